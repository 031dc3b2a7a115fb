"""Health checks of the router that the launcher started.

The launcher needs nothing else of HTTP: with http.client, which imports ssl and email, it would be
2 MB larger.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field

HEALTH = "/health"
"""Succeeds if requests would be answered."""
LIVE = "/v2/health/live"
"""Succeeds if the router answers, whatever the model server does (KServe's liveness)."""

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")
"""RFC 9112, 4"""
_STATUS_LINE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class HealthProbe:
    """The address of a router on this machine."""

    host: str
    port: int
    tls: bool = False
    timeout: float = field(default=5.0, kw_only=True)

    def ask(self, path: str) -> int | None:
        """Return the status of GET ``path``, or None without an answer in time."""
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        try:
            with self._connection() as connection:
                connection.sendall(request.encode("ascii"))
                with connection.makefile("rb") as answer:
                    line = answer.readline(_STATUS_LINE_BYTES)
        except OSError:
            return None
        status = _STATUS_LINE.match(line)
        return None if status is None else int(status[1])

    def _connection(self) -> socket.socket:
        connection = socket.create_connection((self.host, self.port), self.timeout)
        if not self.tls:
            return connection
        import ssl

        # It is our own child, at an address that its certificate need not name.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with connection:  # closed if the handshake fails; wrapping it takes its descriptor over
            return context.wrap_socket(connection)
