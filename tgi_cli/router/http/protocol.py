"""HTTP/1.1 with limits on the time, memory and work that a client can cost.

httptools limits neither the size nor the duration of a request's head, and uvicorn neither the
requests of a pipeline nor the framing of a chunked body; slow or endless heads would occupy memory
and connections (CVE-2025-48956, Slowloris), and small chunks the event loop. The statuses are those
of RFC 9110, 9112 and 6585.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES = 32 * 1024
"""Size limit of the request line, and of all headers together."""
HEADERS = 100
HEAD_SECONDS = 20.0
FRAMING_BYTES = 64 * 1024
"""Size limit of a chunked body's framing beyond the size of the body itself."""
_BODY_SECONDS = 30.0
_BODY_BYTES_PER_SECOND = 64 * 1024
_MARGIN_SECONDS = 5.0
_LINGER_SECONDS = 1.0
_PIECE = 1024
"""Bytes parsed at once, so that a pipeline can be held back between requests."""
_TURN_BYTES = 64 * 1024
"""Bytes parsed in one iteration of the event loop: 10,000 chunks in 30 ms."""
_WAITING_BYTES = 64 * 1024
"""Size limit of what is read ahead of the running request."""


def body_seconds(size: int) -> float:
    """Timeout of a body of at most ``size`` bytes, generous to slow connections."""
    return _BODY_SECONDS + size / _BODY_BYTES_PER_SECOND


class _InvalidRequest(Exception):
    """Ends the parsing; httptools wraps it in one of its own errors."""


class _PipelineFlowControl(FlowControl):
    """Flow control that a pipeline can pause, and that ignores closed connections."""

    held = False

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            super().pause_reading()

    def resume_reading(self) -> None:
        if not self.held and not self._transport.is_closing():
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """Answers 400, 408, 414, 431, 501 and 505 itself, without calling the application.

    A request is not parsed before the previous one is answered. Trailers are dropped, as no route
    uses any; upgrades are ignored.

    Args:
        limit: size limit of the request line, and of the headers.
        head_seconds: timeout of a head, from its first byte, or from the start of the connection.
        body_seconds: timeout of a body, which its reader enforces; the connection of a body
            without reader is closed a little later.
    """

    flow: _PipelineFlowControl

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
        self._waiting = memoryview(b"")
        """Bytes that are not parsed yet."""
        self._running: RequestResponseCycle | None = None
        """The request that is or was answered last; ``cycle`` is the one parsed last."""
        self._parsing: RequestResponseCycle | None = None
        """The request whose body is being parsed."""
        self._in_head = False
        self._in_body = False
        self._head_size = 0
        self._trailers = 0
        self._unparsed = 0
        """Bytes since the parser's last callback, such as those of an endless header."""
        self._body_left = 0
        """Rest of the declared length, or 0 if none is declared."""
        self._body_size = 0
        self._framing = 0
        self._upgrading = False
        self._replaying = False
        self._refusal = HTTPStatus.BAD_REQUEST
        self._refused = False

    # -- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PipelineFlowControl(transport)
        self._set_timer(self._head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_timer()
        self._waiting = memoryview(b"")
        self.pipeline.clear()
        if self._running is not None:  # perhaps not the last one parsed
            self._running.disconnected = not self._running.response_complete
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self._timer is None:
            self._set_timer(self._head_seconds)
        self._waiting = memoryview(bytes(self._waiting) + data if self._waiting else data)
        self._parse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refused and not self._answering():
            self._send_refusal()
        if self._waiting and not self.pipeline:
            self.loop.call_soon(self._parse)  # so that others run between two requests

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self) -> None:
        """Parse what was read, but do not start a request before the last is answered."""
        waiting, self._waiting = self._waiting, memoryview(b"")
        turn = len(waiting) - _TURN_BYTES
        while waiting and not self._refused and not self.transport.is_closing():
            between = not (self._in_head or self._in_body)
            if self.pipeline or (between and self._answering()):
                self._waiting = waiting
                break
            if len(waiting) < turn:
                self._waiting = waiting
                self.loop.call_soon(self._parse)
                break
            self._unset_keepalive_if_required()
            size = self._body_left or _PIECE
            self._feed(waiting[:size])
            waiting = waiting[size:]
        held, self.flow.held = self.flow.held, len(self._waiting) > _WAITING_BYTES
        if self.flow.held:
            self.flow.pause_reading()
        elif held:
            self.flow.resume_reading()

    def _feed(self, piece: memoryview) -> None:
        self._unparsed += len(piece)
        if self._in_body:
            self._framing += len(piece)
        while piece:
            try:
                self.parser.feed_data(piece)
                break
            except httptools.HttpParserUpgrade as upgrade:
                piece = piece[upgrade.args[0] :]
                self._go_on_without_upgrade()
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self._give_up()
                return
        if self._unparsed > self._limit:
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._give_up()
        elif self._in_body and self._framing > FRAMING_BYTES + self._body_size:
            self._give_up()

    def _go_on_without_upgrade(self) -> None:
        """Read the body with a new parser, as the old one ends at an upgrade.

        Java's client requests an upgrade to HTTP/2 with each request that it sends without TLS.
        """
        assert self.cycle is not None
        head = b"POST / HTTP/1.1\r\n"
        for name, value in self.headers:
            if name in (b"content-length", b"transfer-encoding"):
                head += name + b": " + value + b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._upgrading = False
        self._replaying = True
        self.parser.feed_data(head + b"\r\n")
        self._replaying = False

    def _should_upgrade(self) -> bool:
        return False

    # -- the parser ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        super().on_message_begin()
        self._in_head = True
        self._head_size = self._trailers = 0

    def on_url(self, url: bytes) -> None:
        if self._replaying:
            return
        super().on_url(url)
        self._unparsed = 0
        if len(self.url) > self._limit:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying:
            return
        self._unparsed = 0
        self._head_size += len(name) + len(value)
        if self._in_body:
            # A trailer, which as a header would bypass the checks of the head.
            self._trailers += 1
        else:
            super().on_header(name, value)
        if self._head_size > self._limit or len(self.headers) + self._trailers > HEADERS:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._unparsed = 0
        self._check_head()
        self._in_head, self._in_body = False, True
        self._body_size = self._framing = 0
        self._upgrading = self.parser.should_upgrade()
        self._set_timer(self._body_seconds)
        super().on_headers_complete()
        self._parsing = self.cycle

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_left = max(self._body_left - len(body), 0)
        self._body_size += len(body)
        self._framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:  # a body may follow
            return
        self._unparsed = self._body_left = 0
        self._in_body = False
        self._parsing = None
        self._drop_timer()
        super().on_message_complete()

    def _check_head(self) -> None:
        """Refuse heads that proxies and servers interpret differently (RFC 9112, 6.1 and 11.2)."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        found = dict(self.headers)
        if len(found) < len(self.headers) and sum(name == b"host" for name, _ in self.headers) > 1:
            self._refuse(HTTPStatus.BAD_REQUEST)
        coding = found.get(b"transfer-encoding")
        if coding is not None:
            self._check_coding(coding.strip().lower(), version)
        self._body_left = int(found.get(b"content-length", 0))
        if not self.url.startswith(b"/") and self.parser.get_method() != b"CONNECT":
            url = httptools.parse_url(self.url)
            if url.path is None:  # http://HOST
                self.url = b"/?" + url.query if url.query else b"/"

    def _check_coding(self, coding: bytes, version: str) -> None:
        if version == "1.0":
            self._refuse(HTTPStatus.BAD_REQUEST)
        if coding != b"chunked":
            known = coding.rpartition(b",")[2].strip() == b"chunked"
            self._refuse(HTTPStatus.NOT_IMPLEMENTED if known else HTTPStatus.BAD_REQUEST)

    # -- refusals -----------------------------------------------------------------------------

    def _refuse(self, status: HTTPStatus) -> None:
        self._refusal = status
        raise _InvalidRequest(status.phrase)

    def _give_up(self) -> None:
        """Stop parsing; send the refusal after the answers that are due, and close."""
        self._refused = True
        self._drop_timer()
        at_fault, self._parsing = self._parsing, None
        if at_fault is None or (self.pipeline and self.pipeline[0][0] is at_fault):
            if at_fault is not None:
                self.pipeline.popleft()
            if not self._answering():
                self._send_refusal()
            return
        at_fault.disconnected = True  # for the application that awaits the body
        at_fault.message_event.set()
        if at_fault.response_started:
            self.transport.close()
        else:
            self._send_refusal()

    def _send_refusal(self) -> None:
        if self.transport.is_closing():
            return
        text = f"{self._refusal.phrase}\n".encode()
        head = (
            f"HTTP/1.1 {self._refusal.value} {self._refusal.phrase}\r\n"
            "content-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + text)
        # Closing with unread bytes resets the connection, and the client may lose the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

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
        if self.pipeline or (not self._in_body and self._answering()):  # the next request may wait
            self._set_timer(self._head_seconds)
        elif not self._in_head:  # a body without reader, or a connection without request
            self.transport.close()
        else:
            self._refusal = HTTPStatus.REQUEST_TIMEOUT
            self._give_up()
