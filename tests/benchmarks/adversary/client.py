"""HTTP client over raw sockets, which can send invalid requests."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Response:
    """Response to one request.

    Attributes:
        status: of the first response; 0 if the connection closed without one, -1 on timeout.
        seconds: until the response was complete.
        size: in bytes.
        text: beginning of the body.
    """

    status: int
    seconds: float
    size: int
    text: str

    @property
    def blames_server(self) -> bool:
        """Whether the status reports a server failure.

        503 (overloaded), 501 and 505 (unsupported request) do not.
        """
        return (self.status >= 500 and self.status not in (501, 503, 505)) or self.status == 424


class Client:
    """Sends requests to one server, each over a new connection."""

    def __init__(self, address: tuple[str, int], key: str, seconds: float) -> None:
        self.address = address
        self.key = key
        self.seconds = seconds

    def build_request(self, method: str, path: str, body: bytes | None, more: bytes = b"") -> bytes:
        """Return a request as bytes; ``more`` is extra header lines."""
        head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n".encode()
        if self.key:
            head += f"authorization: Bearer {self.key}\r\n".encode()
        if body is None:
            return head + more + b"\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        return head + more + b"\r\n" + body

    def request(self, method: str, path: str, body: bytes | None, more: bytes = b"") -> Response:
        """Send a request and read its response."""
        return self.send([self.build_request(method, path, body, more)])

    def send(
        self,
        pieces: Iterable[bytes],
        pause: float = 0.0,
        read: bool = True,
        half_close: bool = False,
    ) -> Response:
        """Send bytes and read until the server closes the connection or the timeout expires."""
        began = time.monotonic()
        response = bytearray()
        size, late = 0, False
        try:
            with socket.create_connection(self.address, self.seconds) as connection:
                try:
                    for piece in pieces:
                        connection.sendall(piece)
                        if pause:
                            time.sleep(pause)
                    if half_close:
                        connection.shutdown(socket.SHUT_WR)
                except TimeoutError:
                    late = True
                except OSError:  # the server responded before the whole request was sent
                    pass
                if not read:
                    return Response(200, time.monotonic() - began, 0, "")
                while not late:
                    connection.settimeout(max(began + self.seconds - time.monotonic(), 0.01))
                    chunk = connection.recv(1 << 20)
                    if not chunk or size > _MAX_BYTES:
                        break
                    size += len(chunk)
                    if len(response) < 4096:
                        response += chunk
        except TimeoutError:
            late = True
        except OSError:
            pass
        seconds = time.monotonic() - began
        text = bytes(response[:4096]).decode(errors="replace")
        status = 0
        with contextlib.suppress(IndexError, ValueError):
            status = int(text.split(" ", 2)[1])
        if late and not status:
            status = -1
        return Response(status, seconds, size, text.partition("\r\n\r\n")[2][:300])


def plain(lines: Mapping[str, str]) -> bytes:
    """Header lines."""
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in lines.items())
