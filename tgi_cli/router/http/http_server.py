"""The HTTP server: uvicorn with this package's protocol, and without its signal handling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from tgi_cli.router.http.protocol import BoundedProtocol, body_seconds
from tgi_cli.router.http.tls import server_context

BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""Timeout of idle connections, longer than that of clients so that they close first."""
_FLUSH_SECONDS = 5
"""Time for the last bytes of complete answers after the grace period."""


class HttpServer(uvicorn.Server):
    """Leaves signals to its owner, as uvicorn stops listening at once instead of draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def http_server_config(
    app: ASGIApp, payload_limit: int, certfile: Path | None, keyfile: Path | None
) -> uvicorn.Config:
    """The configuration of uvicorn. Raises ConfigError for invalid certificates.

    Args:
        payload_limit: bytes of a request's body.
        certfile: PEM file of a certificate; None for no TLS.
        keyfile: PEM file of its key; None if that is in the same file.
    """
    protocol = partial(BoundedProtocol, body_seconds=body_seconds(payload_limit))
    server = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    server.load()
    if certfile is not None:
        server.ssl = server_context(certfile, keyfile)
    return server
