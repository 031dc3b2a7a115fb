"""Forwards requests to the model that they name, and answers back as they come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from urllib.parse import unquote

import httpx
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tgi_cli.multi_model.model_manager import ModelManager
from tgi_cli.multi_model.tracing import span_of
from tgi_cli.router.api.stream_failure import failure_events, is_event_stream
from tgi_cli.router.bounds import Name
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import BodyMemory, parse, read_body, unless_disconnected
from tgi_cli.router.http.error_styles import style_of
from tgi_cli.router.http.errors import ClientDisconnected
from tgi_cli.router.observability import access_log
from tgi_cli.rpc.interface import GONE

log = logging.getLogger(__name__)

UPSTREAM = "/upstream/"
"""Prefix of paths that name their model: ``/upstream/NAME/generate``, as in llama-swap."""
MODEL_HEADER = b"x-model"

_HOP_BY_HOP = frozenset(
    [
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    ]
)
"""RFC 9110, section 7.6.1."""
_OWN = frozenset([b"host", b"content-length", b"origin", b"x-request-id", MODEL_HEADER])
"""Headers of a request that are replaced; CORS is answered here."""
_OWN_ANSWER = frozenset([b"x-request-id", b"request-id", b"date", b"server"])
"""Headers of an answer that this server sets itself."""
_DRAIN_RETRY_SECONDS = 5
_MOST_BODIES = 1 << 30
"""Bytes of the bodies that are read, wait for their model, or are sent to it."""
_LOOK_UP_SECONDS = 5.0
"""Longest wait for a model's server that is asked whether it has stored a response."""
_EVENT_END = b"\n\n"
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_RESPONSES = ("/v1/responses/", "/responses/")
"""Paths below which stored responses are found by their ids, which name no model."""


class _NamedModel(msgspec.Struct):
    """The part of a body that names the model; everything else is skipped."""

    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Body:
    """A request's body until it has been sent on: an answer may take minutes after that."""

    def __init__(self, content: bytes, memory: BodyMemory) -> None:
        self._content, self._memory = content, memory
        self.size = len(content)
        memory.take(self.size)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content
        self.close()

    def close(self) -> None:
        """Free it. May be called twice."""
        self._memory.give_back(len(self._content))
        self._content = b""


class ModelProxy:
    """An ASGI application that forwards requests.

    Args:
        manager: Loads the models.
        payload_limit: Bytes of a request's body.

    Attributes:
        bodies: The bodies of all requests.
    """

    def __init__(self, manager: ModelManager, payload_limit: int) -> None:
        self._manager = manager
        self._limit = payload_limit
        self.bodies = BodyMemory(max(_MOST_BODIES, 2 * payload_limit))
        self.in_flight = 0
        """Requests, also those that wait for their model."""
        self.draining = False
        """New requests are refused."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Wait until there are no requests."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See https://asgi.readthedocs.io/en/latest/specs/www.html."""
        request = Request(scope, receive)
        if self.draining:
            raise errors.draining(_DRAIN_RETRY_SECONDS)
        self.in_flight += 1
        self._idle.clear()
        try:
            await self._forward(request, send)
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def _forward(self, request: Request, send: Send) -> None:
        scope = request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        if not path.startswith(b"/"):  # OPTIONS *
            raise HTTPException(404)
        named = _header(scope, MODEL_HEADER)
        if path.startswith(UPSTREAM.encode()):
            name, _, rest = path[len(UPSTREAM) :].partition(b"/")
            named, path = unquote(name.decode("ascii", "replace")), b"/" + rest
        body: _Body | None = None
        if _has_body(scope):
            content = await read_body(request, self._limit, self.bodies)
            named = named or _model_of(content)
            body = _Body(content, self.bodies)
            del content
        try:
            await self._forward_to(named, path, body, request, send)
        finally:
            if body is not None:
                body.close()

    async def _forward_to(
        self, named: str | None, path: bytes, body: _Body | None, request: Request, send: Send
    ) -> None:
        """Forward a request to the model of this name; its header and path may name it, too."""
        scope = request.scope
        model = self._manager.resolve(named)
        text_path = path.decode("ascii", "replace")
        if named is None and text_path.startswith(_RESPONSES):
            model = await self._model_of_response(request, text_path) or model
        span, arrived = span_of(scope), time.time_ns()
        async with AsyncExitStack() as stack:
            process = await unless_disconnected(
                request, stack.enter_async_context(self._manager.using(model))
            )
            headers = _request_headers(scope)
            if span is not None:
                span.model_found(model, arrived)
                headers = span.forward(process.url, headers)
            url = path + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            # Not by the client's method, which adds headers of its own: there may be 100.
            sent = httpx.Request(
                scope["method"],
                httpx.URL(process.url).copy_with(raw_path=url),
                headers=[*headers, *_content_length(body)],
                content=body,
                extensions={"timeout": process.client.timeout.as_dict()},
            )
            try:
                answer = await unless_disconnected(request, process.client.send(sent, stream=True))
            except httpx.TransportError as error:
                raise errors.engine_gone(GONE) from error
            stack.push_async_callback(answer.aclose)
            await self._stream(request, answer, send, text_path)
        if text_path in _ADAPTERS and answer.status_code == httpx.codes.OK:
            await self._manager.refresh_cards(model)

    async def _stream(
        self, request: Request, answer: httpx.Response, send: Send, path: str
    ) -> None:
        """Pass an answer on in the pieces in which it comes, until its end or the client's.

        If the model's server is lost, a stream of events to ``path`` ends with an error of its API.
        """
        await send(
            {
                "type": "http.response.start",
                "status": answer.status_code,
                "headers": list(_answer_headers(answer)),
            }
        )
        last = _EVENT_END

        async def pass_on() -> None:
            nonlocal last
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = (last + piece)[-len(_EVENT_END) :]
            await send({"type": "http.response.body", "body": b""})

        try:
            await unless_disconnected(request, pass_on())
        except ClientDisconnected:
            # The answer has begun; closing the connection to the model cancels the request there.
            if (record := access_log.record()) is not None:
                record.dropped = True
        except httpx.TransportError:
            failure = errors.generation_failed(GONE)
            access_log.note(failure)
            if last != _EVENT_END or not is_event_stream(answer.headers.raw):
                raise  # nothing that could follow would be an error to the client
            body = failure_events(style_of(path), failure)
            await send({"type": "http.response.body", "body": body})

    async def _model_of_response(self, request: Request, path: str) -> str | None:
        """The loaded model that has stored a response, or None."""
        id = path.split("/responses/", 1)[1].split("/")[0]
        headers = [
            (name, value)
            for name, value in request.scope["headers"]
            if name in (b"authorization", b"x-api-key")
        ]
        for name, process in self._manager.loaded().items():
            try:
                # Not GET: the response may be megabytes.
                found = await process.client.head(
                    f"/v1/responses/{id}", headers=headers, timeout=_LOOK_UP_SECONDS
                )
            except httpx.HTTPError:
                continue
            if found.status_code == httpx.codes.OK:
                return name
        return None


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((v.decode("latin-1") for name, v in scope["headers"] if name == wanted), None)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _model_of(body: bytes) -> str | None:
    """The model that a body names. Raises ApiError if it is not a JSON object.

    A name that is no text, or too long, is left to the model's server to refuse.
    """
    if body.lstrip()[:1] != b"{":
        return None
    raw = parse(body, _NamedModel).model
    if raw is msgspec.UNSET:
        return None
    try:
        return msgspec.json.decode(raw, type=Name)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _content_length(body: _Body | None) -> list[tuple[bytes, bytes]]:
    return [] if body is None else [(b"content-length", b"%d" % body.size)]


def _request_headers(scope: Scope) -> Iterator[tuple[bytes, bytes]]:
    for name, value in scope["headers"]:
        if name not in _HOP_BY_HOP and name not in _OWN:
            # White space around a value is none of it (RFC 9110, section 5.5), and not sent.
            yield name, value.strip(b" \t")
    record = access_log.record()
    if record is not None:  # so that the logs of both servers have the same id
        yield b"x-request-id", record.request_id.encode()


def _answer_headers(answer: httpx.Response) -> Iterator[tuple[bytes, bytes]]:
    for name, value in answer.headers.raw:
        lower = name.lower()
        cors = lower.startswith(b"access-control-") or lower == b"vary"
        if lower not in _HOP_BY_HOP and lower not in _OWN_ANSWER and not cors:
            yield lower, value
