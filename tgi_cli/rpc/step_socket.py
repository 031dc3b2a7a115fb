"""A session's step messages on a socket of their own, where both ends share a folder.

Submits, cancels and the session's life stay with gRPC. What a step produces is a length (4 bytes,
little endian) and a StepMessage: one write and one read, where a message of a gRPC stream wakes
nine threads in the two processes, on cores that the model computes with.

The client listens on a name in the folder of the model server's socket, which no other user may
enter, and says the name when it opens the session; the server connects before it answers. Where
it does not, for it is on another machine, or others may enter the folder, messages come by gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from tgi_cli.process import unix_socket
from tgi_cli.process.framing import FrameDecoder, encode_frame
from tgi_cli.rpc import engine_pb2 as pb

METADATA = "tgi-steps"
"""The name, of the call's metadata; in the answer's: that the server has connected."""

_NAME = re.compile(r"steps-[0-9a-f]{8}")
_CONNECT_SECONDS = 1.0


class Listener:
    """The client's end, until the server has connected or has not."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where it cannot listen."""
        self.name = f"steps-{secrets.token_hex(4)}"
        self._path = folder / self.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self._path))
            self._socket.listen(1)
        except OSError:
            self.close()
            raise

    @classmethod
    def beside(cls, path: Path | None) -> Listener | None:
        """In the folder of the model server's socket; None where others may enter, or on TCP."""
        try:
            if path is None or not unix_socket.is_private(path.parent):
                return None
            return cls(path.parent)
        except OSError:
            return None

    def accept(self) -> socket.socket:
        """The server's connection, which is there already."""
        connection, _ = self._socket.accept()
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        """Listen no longer; what was accepted stays open."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def connect(folder: Path, name: str) -> socket.socket | None:
    """The server's end of what a client named; None where it cannot be reached."""
    if not _NAME.fullmatch(name):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(str(folder / name))
    except OSError:
        connection.close()
        return None
    connection.settimeout(None)
    return connection


def send(connection: socket.socket, messages: Iterable[pb.StepMessage]) -> None:
    """Send messages until there are no more or the other end is gone; closes the connection."""
    with connection, contextlib.suppress(OSError):
        for message in messages:
            connection.sendall(encode_frame(message.SerializeToString()))


class Reader(asyncio.Protocol):
    """Gives each message that arrives to ``take``.

    Attributes:
        ended: done when no more will come, with the error of ``take`` if that is why.
    """

    def __init__(self, take: Callable[[pb.StepMessage], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._transport: asyncio.BaseTransport | None = None
        self._decoder = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for content in self._decoder.feed(data):
                self._take(pb.StepMessage.FromString(content))
        except Exception as error:  # a defect; who waits for the end is told
            if not self.ended.done():
                self.ended.set_exception(error)
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
