"""Length-prefixed messages between processes: 4 bytes, little endian, and the message."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import socket

_LENGTH = struct.Struct("<I")
_PART_BYTES = 1 << 20

Message = bytes | Sequence[bytes]
"""A message, or its parts, which are not copied together."""


def encode_frame(message: bytes) -> bytes:
    """Return the message after its length."""
    return _LENGTH.pack(len(message)) + message


def frame_parts(message: Message) -> list[bytes]:
    """Return what to send for a message, in order."""
    if isinstance(message, bytes):
        return [encode_frame(message)]
    return [_LENGTH.pack(size_of(message)), *message]


def size_of(message: Message) -> int:
    """Number of bytes of a message."""
    return len(message) if isinstance(message, bytes) else sum(map(len, message))


def split_frame(received: bytearray) -> tuple[bytes, bytes] | None:
    """Return the first message and the bytes after it, or None if it is not complete."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    return bytes(received[_LENGTH.size : end]), bytes(received[end:])


def read_length(stream: BinaryIO) -> int | None:
    """Read the length of the next message, or None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    return _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else None


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next message, or None at the end of the stream."""
    length = read_length(stream)
    message = b"" if length is None else stream.read(length)
    return message if len(message) == length else None


class FrameDecoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest: bytearray | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete by now."""
        buffer: bytes | bytearray = data
        if self._rest is not None:
            self._rest += data
            buffer = self._rest
        messages = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            messages.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        if start == len(buffer):
            self._rest = None
        elif start or self._rest is None:
            self._rest = bytearray(buffer[start:])
        return messages


class Channel:
    """One end of a connected socket that carries messages. Any thread may send, one receives.

    Attributes:
        limit: bytes of a message that is received; None for no limit.
    """

    def __init__(self, connection: socket.socket, limit: int | None = None) -> None:
        self.limit = limit
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a message; blocks while the other end is behind. Raises OSError if it is gone."""
        with self._sending:
            self._socket.sendall(encode_frame(message))

    def receive(self) -> bytes | None:
        """Receive the next message, or None if the other end is gone.

        Raises:
            ValueError: the message is larger than the limit.
        """
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if self.limit is not None and length > self.limit:
            raise ValueError(f"a message has {length} bytes, and at most {self.limit} are expected")
        return self._read(length)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        """End both directions, from any thread."""
        try:
            self._socket.shutdown(2)  # SHUT_RDWR
        except OSError:
            return  # the other end is gone already

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        """Receive ``size`` bytes, or None if the other end is gone.

        Memory is taken as they arrive: the length comes from the other end, or from whoever can
        change what it sends.
        """
        parts = []
        while size:
            part = self._receive_part(min(size, _PART_BYTES))
            if part is None:
                return None
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _receive_part(self, size: int) -> bytes | None:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionError:
                return None
            if not count:
                return None
            view = view[count:]
        return bytes(buffer)
