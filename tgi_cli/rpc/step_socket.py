"""A session's step messages on a socket of their own, where both ends share a folder.

Submits, cancels and the life of the session stay with gRPC. Each step is one StepMessage in a frame
(:mod:`tgi_cli.process.framing`): one write and one read, where a message of a gRPC stream wakes
nine threads in the two processes, on cores that the model computes with.

The client listens on a name in the folder of the model server's socket, which no other user may
enter, and sends the name when it opens the session; the server connects before it answers. If it
does not, because it is on another machine or the folder is not private, messages come by gRPC.
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
"""Key of the socket's name in the call's metadata; present in the answer's once connected."""

_NAME = re.compile(r"steps-[0-9a-f]{8}")
_CONNECT_SECONDS = 1.0


class Listener:
    """The client's end until the server has answered."""

    def __init__(self, folder: Path) -> None:
        """Listen in a folder. Raises OSError."""
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
        """Listen beside the server's socket, or return None if its folder is not private."""
        try:
            if path is None or not unix_socket.is_private(path.parent):
                return None
            return cls(path.parent)
        except OSError:
            return None

    def accept(self) -> socket.socket:
        """Return the server's connection, which exists already."""
        connection, _ = self._socket.accept()
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        """Stop listening; an accepted connection stays open."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def connect(folder: Path, name: str) -> socket.socket | None:
    """Connect to the client's socket, or return None if it is unreachable."""
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
    """Send all messages unless the other end is gone; closes the connection."""
    with connection, contextlib.suppress(OSError):
        for message in messages:
            connection.sendall(encode_frame(message.SerializeToString()))


class Reader(asyncio.Protocol):
    """Calls ``deliver`` with each message that arrives.

    Attributes:
        ended: Done at the end of the connection, with the error of ``deliver`` if it raised one.
    """

    def __init__(self, deliver: Callable[[pb.StepMessage], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deliver = deliver
        self._transport: asyncio.BaseTransport | None = None
        self._decoder = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for content in self._decoder.feed(data):
                self._deliver(pb.StepMessage.FromString(content))
        except Exception as error:  # a defect, which awaiting ``ended`` raises
            if not self.ended.done():
                self.ended.set_exception(error)
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
