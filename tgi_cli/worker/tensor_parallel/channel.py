"""Messages over a connected socket: each is its length, 32 bits, and its bytes."""

from __future__ import annotations

import socket
import struct
import threading

_LENGTH = struct.Struct("<I")


class Channel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Blocks while the other end is behind. Raises OSError when it is gone."""
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """The next message; None when the other end is gone."""
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(_LENGTH.unpack(head)[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        """Tell both ends that nothing more comes; from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end is gone already

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
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
