"""A TCP proxy on 127.0.0.1 that closes connections in the middle of what they bring.

with CuttingProxy(port) as proxy:
    proxy.cut_after = 1_000_000  # the next connection that has brought so much is closed
    ...
    assert proxy.cuts == 1
"""

from __future__ import annotations

import contextlib
import socket
import threading

_PIECE = 1 << 16


class CuttingProxy:
    """Passes connections on to a port.

    Attributes:
        cut_after: bytes from the server after which the next connection is closed; None for never.
        cuts: connections that were closed so.
        brought: bytes from the server, of all connections.
    """

    def __init__(self, port: int) -> None:
        self.cut_after: int | None = None
        self.cuts = 0
        self.brought = 0
        self._port = port
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> CuttingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for work in (self._pass_on, self._bring):
                    threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_PIECE):
                server.sendall(data)
        _close(client, server)

    def _bring(self, client: socket.socket, server: socket.socket) -> None:
        total = 0
        with contextlib.suppress(OSError):
            while data := server.recv(_PIECE):
                total += len(data)
                with self._lock:
                    cut = self.cut_after is not None and total >= self.cut_after
                    if cut:
                        self.cut_after = None
                        self.cuts += 1
                    self.brought += len(data)
                client.sendall(data)
                if cut:
                    break
        _close(client, server)


def _close(*connections: socket.socket) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
