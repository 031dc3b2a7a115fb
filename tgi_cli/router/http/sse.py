"""Server-sent events, written straight to the ASGI channel.

Framing is TGI's: ``data: JSON`` and an empty line, no event names, a comment after 15 seconds of
silence (https://html.spec.whatwg.org/multipage/server-sent-events.html). A response class that
wraps an iterator of events costs twice to four times as much per event as sending bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from starlette.types import Receive, Scope, Send

from tgi_cli.router.generation.deltas import Delta, DeltaSource
from tgi_cli.router.http import errors

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b":\n\n"
DIRECT_SEND = "tgi.send"
"""In the scope: the server's own ``send``. The layers around the routes look at the head of an
answer alone; what follows goes past them, which saves a tenth of what an event costs."""


class EventEncoder(Protocol):
    """How one API writes its stream."""

    def encode(self, delta: Delta) -> bytes:
        """All events of one delta, framed; empty when there is nothing to show."""
        ...

    def fail(self, error: errors.ApiError) -> bytes:
        """The events that end a stream that failed."""
        ...

    def end(self) -> bytes:
        """The events behind the last delta."""
        ...


class EventStream:
    """An ASGI response that sends what a source generates, until it ends or the client goes.

    Whatever ends the stream, the source is closed, which frees its sequences.
    """

    def __init__(
        self, source: DeltaSource, encoder: EventEncoder, headers: Mapping[str, str] | None = None
    ) -> None:
        self._source = source
        self._encoder = encoder
        self._headers = headers or {}
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
        except Exception:  # a defect: the client gets an event instead of a torn stream
            logger.exception("stream failed")
            last = self._encoder.fail(errors.internal())
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has gone; keep a silent connection alive until then."""
        clock = asyncio.get_running_loop().time
        while True:
            rest = self._written + KEEP_ALIVE_SECONDS - clock()
            if rest <= 0:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._written = clock()
                continue
            try:
                async with asyncio.timeout(rest):
                    if (await receive())["type"] == "http.disconnect":
                        return
            except TimeoutError:
                continue


class FailedSource:
    """A source that has failed before its first delta: TGI's streams tell even that inside."""

    def __init__(self, error: errors.ApiError) -> None:
        self._error = error

    def __aiter__(self) -> FailedSource:
        return self

    async def __anext__(self) -> Delta:
        raise self._error

    def close(self) -> None:
        """Nothing to free."""
