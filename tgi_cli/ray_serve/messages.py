"""What passes between the deployments: requests, and answers in parts."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_cli.router.replicas.policy import RoutingKey

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """An HTTP request on its way to a replica.

    Attributes:
        key: What the choice of the replica depends on.
        avoid: Replicas that have refused it.
        last_attempt: A replica whose model server is gone answers 503 instead of refusing it.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None
    key: RoutingKey
    avoid: tuple[str, ...] = ()
    last_attempt: bool = False


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """The first part of an answer, with what there is of its body; the others are bytes."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """The replica has no model server at the moment and has done nothing."""

    replica: str


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """A complete answer, and which replica it is from."""

    replica: str
    status: int
    headers: Headers
    body: bytes
