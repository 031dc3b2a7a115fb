"""Endpoints: routes that decode their body and describe themselves for the API's document."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.generation.deltas import DeltaSource
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.merge import Whole, collect
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.validation import request_timeout
from tgi_cli.router.http.bodies import json_response, parse, read_body
from tgi_cli.router.http.errors import ApiError
from tgi_cli.router.http.sse import KEEP_ALIVE, EventEncoder, EventStream
from tgi_cli.router.observability import access_log
from tgi_cli.router.replicas.pool import EnginePool
from tgi_cli.router.state import RouterState, state_of

T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S")

_READING = (400, 408, 413, 415, 422, 429, 500)
"""Statuses of any endpoint that reads a body."""
_GENERATING = (424, 503, 504)
"""Further statuses of those that generate."""

TENANT = "tenant"
"""Name in a request's ASGI scope of whose API key it has: bytes that differ by key, and are missing
without keys."""

SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "session_id")
"""Session headers of Claude Code, and of Codex in its newer and older versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What an endpoint takes and answers, for the API's document.

    Attributes:
        tag: the group that the document shows it in.
        body: the types that its body may have; empty if it has none.
        answer: the types of a complete answer, in ``media_type``.
        events: the types of a stream's events.
        referenced: types that the schemas refer to by name only.
        query: schemas of the query's parameters, by name.
        errors: statuses besides those that reading a body and generating imply.
        generates: the request may set a deadline, and the answer has TGI's timing headers.
        public: no API key is needed.
        example: a body.
    """

    tag: str
    body: tuple[Any, ...] = ()
    answer: tuple[Any, ...] = ()
    media_type: str = "application/json"
    events: tuple[Any, ...] = ()
    referenced: tuple[Any, ...] = ()
    query: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    generates: bool = False
    public: bool = False
    example: Any = None

    @property
    def statuses(self) -> tuple[int, ...]:
        """All statuses of errors."""
        reading = _READING if self.body else ()
        return (*reading, *(_GENERATING if self.generates else ()), *self.errors)


@dataclass(frozen=True, slots=True)
class RequestContext(Generic[T_co]):
    """A request, its decoded body, and the ways to answer it.

    Attributes:
        arrived: ``time.perf_counter()`` when the request's head was complete.
    """

    request: Request
    state: RouterState
    body: T_co
    arrived: float

    def with_body(self, body: S) -> RequestContext[S]:
        """The same request with its body read differently."""
        return RequestContext(self.request, self.state, body, self.arrived)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count the request as refused if the block raises ApiError."""
        try:
            yield
        except ApiError as error:
            raise self.state.generator.refuse(error) from None

    async def open(
        self, specs: Sequence[GenerationSpec], *, chat: bool = False
    ) -> list[Generation]:
        """Start all samples of all prompts, or none; ``chat`` for traces. Raises ApiError."""
        if (record := access_log.record()) is not None:
            record.model = getattr(self.body, "model", None) or ""
            if chat:
                record.operation = "chat"
        with self.preparing():
            timeout = request_timeout(self.request)
        tenant = self.request.scope.get(TENANT)
        if tenant is not None:
            specs = [replace(spec, tenant=tenant) for spec in specs]
        if isinstance(self.state.client, EnginePool) and (session := self._session):
            specs = [replace(spec, session=session) for spec in specs]
        return await self.state.generator.open(specs, self.arrived, timeout)

    @property
    def _session(self) -> str:
        """The name by which an agent identifies the conversation, or an empty string."""
        headers = self.request.headers
        for name in SESSION_HEADERS:
            if value := headers.get(name):
                return value
        return getattr(self.body, "prompt_cache_key", None) or ""

    async def collect(self, generations: Sequence[Generation]) -> list[Whole]:
        """Read all generations to their end. Raises ApiError or ClientDisconnected."""
        return await collect(self.request, generations)

    def answer(self, content: Any, generations: Sequence[Generation]) -> Response:
        """A complete answer as JSON, with TGI's timing headers."""
        return json_response(content, self.state.timing_headers(generations))

    def stream(
        self,
        source: DeltaSource,
        encoder: EventEncoder,
        characters: int,
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
    ) -> EventStream:
        """A stream of events; ``characters`` is the length of the prompts."""
        return EventStream(source, encoder, self.state.stream_headers(characters), keep_alive)


Handler = Callable[[RequestContext[Any]], Awaitable[Any]]


class Endpoint(Route):
    """A route whose handler gets a RequestContext.

    Args:
        decode: decodes the body. Default: as the only type of ``operation.body``.
        require: raises ApiError before the body is read if the server does not allow the request.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        operation: Operation,
        *,
        method: str = "POST",
        name: str | None = None,
        decode: Callable[[bytes], Any] | None = None,
        require: Callable[[RouterState], None] | None = None,
    ) -> None:
        self.operation = operation
        if decode is None and operation.body:
            (kind,) = operation.body
            decode = partial(parse, kind=kind)

        @wraps(handler)
        async def endpoint(request: Request) -> Any:
            arrived = time.perf_counter()
            state = state_of(request)
            if require is not None:
                require(state)
            body = None
            if decode is not None:
                raw = await read_body(request, state.payload_limit, state.bodies)
                body = decode(raw)
                if operation.generates:
                    state.misspellings.check(path, raw, body)
                del raw  # of megabytes, if it has images
            return await handler(RequestContext(request, state, body, arrived))

        super().__init__(path, endpoint, methods=[method], name=name)
