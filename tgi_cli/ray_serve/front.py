"""The application in front of the replicas: reads a request, and passes on a replica's answer.

Ray's proxies choose replicas before they read a body, so that a deployment of its own has to read
it. It decodes no more than what prompts are compared by; everything else is done by the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tgi_cli.ray_serve.messages import (
    ForwardedRequest,
    Headers,
    Refusal,
    ResponseStart,
    WholeResponse,
)
from tgi_cli.ray_serve.request_key import request_key
from tgi_cli.router.api.stream_failure import failure_events, is_event_stream
from tgi_cli.router.http import errors
from tgi_cli.router.http.auth import ApiKeys
from tgi_cli.router.http.error_styles import error_response, style_for
from tgi_cli.router.http.protocol import body_seconds
from tgi_cli.router.observability import openmetrics
from tgi_cli.router.observability.prometheus import CONTENT_TYPE, by_label
from tgi_cli.rpc.interface import GONE

log = logging.getLogger(__name__)

ATTEMPTS = 4
"""Replicas that are asked for an answer at most."""
_HEALTH_SECONDS = 5.0
"""Time for a replica to answer a health check."""
_METRICS_SECONDS = 5.0
_OVERLOADED_SECONDS = 1
"""Retry-After when Ray's queue is full."""
_MOST_HELD = 1 << 30
"""Bytes of the bodies of all requests that have not been answered."""
_HEALTH = ("/health", "/ping")
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_OWN_HEADERS = frozenset([b"x-request-id", b"date", b"server"])
"""Headers of an answer that Ray's proxy writes."""


class ReplicaStream(Protocol):
    """The parts of one answer."""

    def __aiter__(self) -> AsyncIterator[ResponseStart | Refusal | bytes]: ...

    def cancel(self) -> None: ...


class Replicas(Protocol):
    """The replicas, as this application needs them.

    Attributes:
        full: Error of a request that finds the queue full.
        lost: Error of an answer whose replica has died.
    """

    full: type[Exception]
    lost: type[Exception]

    def send(self, request: ForwardedRequest) -> ReplicaStream:
        """Send a request to a replica, of Ray's choice."""
        ...

    async def send_to_all(self, request: ForwardedRequest, seconds: float) -> list[WholeResponse]:
        """Send a request to each replica; returns the answers that came within ``seconds``."""
        ...


class FrontApp:
    """An ASGI application in front of replicas.

    Args:
        replicas: What it sends requests to.
        body_limit: Bytes of a body that are read. Replicas refuse what is larger than their limit.
        keys: API keys, one of which clients must send. Replicas refuse who has none; here, bodies
            of such requests are not read. Default: none is required.
    """

    def __init__(self, replicas: Replicas, body_limit: int, keys: Sequence[str] = ()) -> None:
        self._replicas = replicas
        self._limit = body_limit
        self._keys = ApiKeys(keys) if keys else None
        self._held = 0
        """Bytes of the bodies of all requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See https://asgi.readthedocs.io/en/latest/specs/www.html."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, receive, send)
            except errors.ApiError as error:
                await error_response(scope, error)(scope, receive, send)
            except errors.ClientDisconnected:
                pass
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises ApiError before anything is sent."""
        path = scope["path"]
        if path in _ADAPTERS:
            raise errors.forbidden(
                "replicas on Ray do not load adapters while they run, since new ones would lack "
                "them: start the server with --lora-adapters"
            )
        async with self._body(scope, receive) as body:
            await self._answer_with(body, scope, receive, send)

    async def _answer_with(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        headers = _headers(scope)
        client = scope.get("client")
        request = ForwardedRequest(
            method=scope["method"],
            path=path,
            query=scope["query_string"],
            headers=headers,
            body=body,
            client=None if client is None else (client[0], client[1]),
            key=request_key(headers, body),
        )
        if path == "/metrics":
            await (await self._metrics(request))(scope, receive, send)
        elif path in _HEALTH:
            try:
                async with asyncio.timeout(_HEALTH_SECONDS):
                    await self._pass_on(request, scope, send)
            except TimeoutError:
                raise errors.engine_gone("no replica answers") from None
        else:
            await self._pass_on(request, scope, send)

    @asynccontextmanager
    async def _body(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body, or its beginning if it is too large; empty if the key is missing or wrong.

        Raises:
            ApiError: 408, it is too slow; 429, all requests hold too much.
            ClientDisconnected: The client is gone.
        """
        chunks: list[bytes] = []
        try:
            if self._keys is None or self._keys.tenant(_headers(scope)) is not None:
                await self._read(scope, receive, chunks)
            yield b"".join(chunks)
        finally:
            self._held -= sum(map(len, chunks))

    async def _read(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> None:
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self._limit:
            return  # the replica refuses it by its declared length
        size = 0
        try:
            async with asyncio.timeout(body_seconds(self._limit)):
                more = True
                while more and size <= self._limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise errors.ClientDisconnected
                    chunk = message.get("body", b"")
                    if self._held + len(chunk) > max(_MOST_HELD, 2 * self._limit):
                        raise errors.overloaded(_OVERLOADED_SECONDS)
                    chunks.append(chunk)
                    self._held += len(chunk)
                    size += len(chunk)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise errors.late_body() from None

    async def _pass_on(self, request: ForwardedRequest, scope: Scope, send: Send) -> None:
        """Send the answer of the first replica that does not refuse. Raises ApiError."""
        parts: ReplicaStream | None = None
        start: ResponseStart | bytes | None = None
        ended = False
        try:
            for attempt in range(ATTEMPTS):
                parts = self._replicas.send(replace(request, last_attempt=attempt == ATTEMPTS - 1))
                first = await anext(aiter(parts), None)
                if not isinstance(first, Refusal):
                    start = first
                    break
                request = replace(request, avoid=(*request.avoid, first.replica))
            if not isinstance(start, ResponseStart) or parts is None:
                raise errors.internal()
            headers = [(k, v) for k, v in start.headers if k.lower() not in _OWN_HEADERS]
            await send({"type": "http.response.start", "status": start.status, "headers": headers})
            if start.body:
                await send(_body_message(start.body))
            async for part in parts:
                assert isinstance(part, bytes)
                await send(_body_message(part))
            await send(_body_message(b"", more=False))
            ended = True
        except self._replicas.full:
            raise errors.overloaded(_OVERLOADED_SECONDS) from None
        except self._replicas.lost as error:
            log.warning("a replica was lost with a request in flight: %s", type(error).__name__)
            if not isinstance(start, ResponseStart):
                raise errors.engine_gone(GONE) from None
            if not is_event_stream(start.headers):
                raise
            failure = failure_events(style_for(scope), errors.generation_failed(GONE))
            await send(_body_message(failure, more=False))
        finally:
            if parts is not None and not ended:
                parts.cancel()

    async def _metrics(self, request: ForwardedRequest) -> Response:
        """The metrics of all replicas, by replica. Raises ApiError."""
        answers = await self._replicas.send_to_all(request, _METRICS_SECONDS)
        if not answers:
            raise errors.engine_gone("no replica answers")
        for answer in answers:
            if answer.status != 200:
                headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in answer.headers}
                return Response(answer.body, answer.status, headers)
        lines = [*by_label("replica", _lines_by_replica(answers))]
        accepted = [v.decode("latin-1") for k, v in request.headers if k == b"accept"]
        content_type = CONTENT_TYPE
        if openmetrics.is_accepted(",".join(accepted)):  # and so the replicas have answered
            content_type = openmetrics.CONTENT_TYPE
            lines.append(openmetrics.END)
        head = {"content-type": content_type, "vary": "accept"}
        return Response("\n".join([*lines, ""]), headers=head)


def _headers(scope: Scope) -> Headers:
    return [(bytes(name), bytes(value)) for name, value in scope["headers"]]


def _lines_by_replica(answers: Sequence[WholeResponse]) -> dict[str, list[str]]:
    ordered = sorted(answers, key=lambda answer: answer.replica)
    # Values may hold what else ends lines.
    return {answer.replica: answer.body.decode().rstrip("\n").split("\n") for answer in ordered}


def _body_message(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _live(receive: Receive, send: Send) -> None:
    """Answer the messages of an application's start and end."""
    while True:
        kind = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{kind}.complete"})
        if kind == "shutdown":
            return
