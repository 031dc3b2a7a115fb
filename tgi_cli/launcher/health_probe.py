"""Health checks of the router that the launcher started."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass, field

HEALTH = "/health"
"""Succeeds if requests would be answered."""
LIVE = "/v2/health/live"
"""Succeeds if the router answers, whatever the model server does (KServe's liveness)."""


@dataclass(frozen=True, slots=True)
class HealthProbe:
    """The address of a router on this machine."""

    host: str
    port: int
    tls: bool = False
    timeout: float = field(default=5.0, kw_only=True)

    def ask(self, path: str) -> int | None:
        """Return the status of GET ``path``, or None without an answer in time."""
        connection = self._connection()
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        # It is our own child, at an address that its certificate need not name.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=self.timeout, context=context
        )
