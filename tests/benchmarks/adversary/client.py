"""A client of raw bytes: it can send what no library would."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Answer:
    """Of one request.

    Attributes:
        status: of the first answer; 0: the connection ended without one; -1: not in time.
        seconds: until it was complete.
        size: bytes of it.
        text: its beginning.
    """

    status: int
    seconds: float
    size: int
    text: str

    @property
    def blames_server(self) -> bool:
        """Whether it says that the server has failed.

        503 says that it is busy, 501 and 505 that no server of HTTP/1.1 would do that.
        """
        return (self.status >= 500 and self.status not in (501, 503, 505)) or self.status == 424


class Client:
    """Speaks to one server; a connection for each request."""

    def __init__(self, address: tuple[str, int], key: str, seconds: float) -> None:
        self.address = address
        self.key = key
        self.seconds = seconds

    def request(self, method: str, path: str, body: bytes | None, more: bytes = b"") -> bytes:
        """A request's bytes; ``more`` are further header lines."""
        head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n".encode()
        if self.key:
            head += f"authorization: Bearer {self.key}\r\n".encode()
        if body is None:
            return head + more + b"\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        return head + more + b"\r\n" + body

    def ask(self, method: str, path: str, body: bytes | None, more: bytes = b"") -> Answer:
        """Send it and read the answer."""
        return self.send([self.request(method, path, body, more)])

    def send(
        self,
        pieces: Iterable[bytes],
        pause: float = 0.0,
        read: bool = True,
        half_close: bool = False,
    ) -> Answer:
        """Send bytes and read until the server closes, or an answer's end is not to come."""
        began = time.monotonic()
        answer = bytearray()
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
                except OSError:  # it has answered before the end
                    pass
                if not read:
                    return Answer(200, time.monotonic() - began, 0, "")
                while not late:
                    connection.settimeout(max(began + self.seconds - time.monotonic(), 0.01))
                    chunk = connection.recv(1 << 20)
                    if not chunk or size > _MOST_BYTES:
                        break
                    size += len(chunk)
                    if len(answer) < 4096:
                        answer += chunk
        except TimeoutError:
            late = True
        except OSError:
            pass
        seconds = time.monotonic() - began
        text = bytes(answer[:4096]).decode(errors="replace")
        status = 0
        with contextlib.suppress(IndexError, ValueError):
            status = int(text.split(" ", 2)[1])
        if late and not status:
            status = -1
        return Answer(status, seconds, size, text.partition("\r\n\r\n")[2][:300])


def plain(lines: Mapping[str, str]) -> bytes:
    """Header lines."""
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in lines.items())
