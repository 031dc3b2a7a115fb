"""Server-sent events, sent directly to the ASGI channel.

Framing is TGI's: ``data: JSON`` and an empty line, no event names, a comment after 15 seconds
without events (https://html.spec.whatwg.org/multipage/server-sent-events.html). A response class
that wraps an iterator of events costs two to four times as much per event as sending bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import Receive, Scope, Send

from tgi_cli.router.generation.deltas import Delta, DeltaSource
from tgi_cli.router.http import errors

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b":\n\n"
DIRECT_SEND = "tgi.send"
"""Key of the server's own ``send`` in the scope. Middleware only handles the head of an answer;
events bypass it, which saves a tenth of the cost of an event."""


class EventEncoder(Protocol):
    """Encodes the stream of one API."""

    def encode(self, delta: Delta) -> bytes:
        """The framed events of one delta; may be empty."""
        ...

    def fail(self, error: errors.ApiError) -> bytes:
        """The events that end a failed stream."""
        ...

    def end(self) -> bytes:
        """The events after the last delta."""
        ...


class EventStream:
    """An ASGI response that streams a source until it ends or the client disconnects.

    It always closes the source, which frees its sequences.

    Args:
        keep_alive: Makes what is sent after 15 seconds without events. Default: a comment.
    """

    def __init__(
        self,
        source: DeltaSource,
        encoder: EventEncoder,
        headers: Mapping[str, str] | None = None,
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
    ) -> None:
        self._source = source
        self._encoder = encoder
        self._headers = headers or {}
        self._keep_alive = keep_alive
        self._written = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *(
                (name.encode("latin-1"), text.encode("latin-1"))
                for name, text in self._headers.items()
            ),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            send = scope.get(DIRECT_SEND, send)
            self._written = asyncio.get_running_loop().time()
            pump = asyncio.ensure_future(self._pump(send))
            watcher = asyncio.ensure_future(self._watch(receive, send))
            try:
                await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
            finally:
                pump.cancel()
                watcher.cancel()
                await asyncio.wait({pump, watcher})
        finally:
            self._source.close()

    async def _pump(self, send: Send) -> None:
        encode = self._encoder.encode
        clock = asyncio.get_running_loop().time
        try:
            async for delta in self._source:
                events = encode(delta)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    self._written = clock()
            last = self._encoder.end()
        except errors.ApiError as error:
            last = self._encoder.fail(error)
        except Exception:  # a bug: the client gets an event instead of a broken stream
            logger.exception("stream failed")
            last = self._encoder.fail(errors.internal())
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Keep the connection alive until the client disconnects."""
        clock = asyncio.get_running_loop().time
        while True:
            rest = self._written + KEEP_ALIVE_SECONDS - clock()
            if rest <= 0:
                await send(
                    {"type": "http.response.body", "body": self._keep_alive(), "more_body": True}
                )
                self._written = clock()
                continue
            try:
                async with asyncio.timeout(rest):
                    if (await receive())["type"] == "http.disconnect":
                        return
            except TimeoutError:
                continue


class FailedSource:
    """A source that fails at once, as TGI's streams report even early errors as events."""

    def __init__(self, error: errors.ApiError) -> None:
        self._error = error

    def __aiter__(self) -> FailedSource:
        return self

    async def __anext__(self) -> Delta:
        raise self._error

    def close(self) -> None:
        """Nothing to free."""
