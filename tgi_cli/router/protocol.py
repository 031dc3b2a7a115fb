"""HTTP/1.1 with bounds on what a client may make the server wait for or remember.

httptools itself bounds neither the head of a request nor the time that it takes; slow or endless
heads would hold memory and connections (CVE-2025-48956, Slowloris). RFC 9110 and 6585 have the
statuses.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 32 * 1024
"""Of the request line, and of all headers together."""
HEADERS = 100
HEAD_SECONDS = 20.0
_BODY_SECONDS = 30.0
_BODY_BYTES_PER_SECOND = 64 * 1024
_MARGIN_SECONDS = 5.0


def body_seconds(size: int) -> float:
    """What a body of at most ``size`` bytes may take: slow lines are fine, standstill is not."""
    return _BODY_SECONDS + size / _BODY_BYTES_PER_SECOND


class _Refused(Exception):
    """Ends the parsing; httptools passes it on as one of its own errors."""


class BoundedProtocol(HttpToolsProtocol):
    """Answers 414, 431 and 408 by itself, before any application is asked.

    Args:
        limit: bytes of a request's line, and of its headers.
        head_seconds: for a head, from its first byte (of a connection's first: from the start).
        body_seconds: for a body. Whoever reads it enforces that; a connection whose body nobody
            reads is closed a little later.
    """

    def __init__(
        self,
        *args: Any,
        limit: int = HEAD_BYTES,
        head_seconds: float = HEAD_SECONDS,
        body_seconds: float = _BODY_SECONDS,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limit = limit
        self._head_seconds = head_seconds
        self._body_seconds = body_seconds + _MARGIN_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._in_body = False
        self._head_size = 0
        self._unparsed = 0
        """Bytes since anything came out of the parser: of a header that does not end."""
        self._refusal = HTTPStatus.BAD_REQUEST

    # -- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(self._head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:
            self._set_timer(self._head_seconds)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self._limit and not self.transport.is_closing():
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self.send_400_response("")

    # -- the parser ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_size = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._unparsed = 0
        if len(self.url) > self._limit:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._unparsed = 0
        self._head_size += len(name) + len(value)
        if self._head_size > self._limit or len(self.headers) > HEADERS:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._in_head, self._in_body = False, True
        self._set_timer(self._body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._in_body = False
        self._drop_timer()
        super().on_message_complete()

    # -- refusals -----------------------------------------------------------------------------

    def _refuse(self, status: HTTPStatus) -> None:
        self._refusal = status
        raise _Refused(status.phrase)

    def send_400_response(self, msg: str) -> None:
        """Answer with the status of the refusal, unless another answer is under way; close."""
        if self._answering():
            self.transport.close()
            return
        text = f"{self._refusal.phrase}\n".encode()
        head = (
            f"HTTP/1.1 {self._refusal.value} {self._refusal.phrase}\r\n"
            "content-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + text)
        self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # -- time ---------------------------------------------------------------------------------

    def _set_timer(self, seconds: float) -> None:
        self._drop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if not self._in_body and self._answering():  # what comes next may wait for that
            self._set_timer(self._head_seconds)
        elif not self._in_head:  # a body that nobody reads, or a connection without a request
            self.transport.close()
        else:
            self._refusal = HTTPStatus.REQUEST_TIMEOUT
            self.send_400_response("")
