"""The router's process: connects to the engine, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time

import anyio
import uvicorn
import uvloop
from starlette.applications import Starlette

import tgi_cli.logging
from tgi_cli.errors import AddressInUseError, RouterError
from tgi_cli.process.bind import bind
from tgi_cli.process.resident_memory import limit_arenas, release_file_pages, trim_heap
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.http.http_server import BACKLOG, HttpServer, http_server_config
from tgi_cli.router.launcher_connection import LauncherConnection
from tgi_cli.router.running_app import running_app
from tgi_cli.router.state import RouterState

logger = logging.getLogger(__name__)

_ARENAS = 2
"""Arenas of malloc. One thread serves; others tokenize long texts and handle messages."""
_STOPPING = "the server is shutting down"
_SAME_SIGNAL_SECONDS = 1.0
"""Time within which signals count as one: a service manager that signals all processes also
signals the launcher, which forwards it."""


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT; return when the requests in flight are complete.

    The port does not listen before the engine is ready. The first signal drains: new requests
    get 503, those in flight have ``graceful_termination_timeout`` seconds. A second signal, more
    than a second later, ends those too.

    Raises:
        AddressInUseError: the port is taken.
        ConfigError: the address, a certificate, its key or the engine's address is invalid, or
            traces cannot be sent.
        ModelError: the tokenizer or the chat template is missing or unreadable.
        ShardError: the TLS handshake with the engine fails.
        RouterError: the HTTP server stopped by itself.
    """
    tgi_cli.logging.setup("router", config.logger_level, config.json_output)
    limit_arenas(_ARENAS)
    with _bound_socket(config) as listener:
        listener.setblocking(False)
        uvloop.run(_Router(config, listener).run())


class _Router:
    """One run: starting, serving and draining."""

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._server: HttpServer | None = None
        self._state: RouterState | None = None
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signalled = 0.0
        """Time of the first signal."""

    async def run(self) -> None:
        """See :func:`run_router`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._starting = asyncio.ensure_future(self._serve())
        try:
            await self._starting
        except asyncio.CancelledError:
            logger.info("stopped before the engine was ready")
        finally:
            if self._draining is not None:
                self._draining.cancel()

    async def _serve(self) -> None:
        config = self._config
        async with running_app(config) as app:
            self._state = app.state.router
            await self._attach_launcher(self._state)
            host, port = self._listener.getsockname()[:2]
            try:
                self._listener.listen(BACKLOG)
            except OSError as error:
                raise AddressInUseError(
                    f"cannot serve on {host} port {port}: {error.strerror or error}",
                    "stop what uses it, or choose another --hostname or --port",
                ) from error
            # Otherwise the first streamed answer imports anyio's backend, for 40 ms of the loop.
            async with anyio.create_task_group():
                pass
            # Exempt what exists by now, which lives as long as the process, from collections.
            gc.collect()
            gc.freeze()
            trim_heap()
            release_file_pages()
            self._server = HttpServer(uvicorn_config(app, config))
            scheme = "https" if config.ssl_certfile else "http"
            logger.info("listening on %s port %d (%s)", host, port, scheme)
            await self._server.serve(sockets=[self._listener])
            if self._draining is None:
                raise RouterError("the HTTP server stopped by itself", "see the log above")

    async def _attach_launcher(self, state: RouterState) -> None:
        """Let the engine sleep, if there is a launcher to stop and start it."""
        config, sleep = self._config, state.sleep
        if config.control_fd is not None:
            launcher = await LauncherConnection.open(config.control_fd, sleep.on_outcome)
            sleep.attach(launcher, config.sleep_idle_seconds)

    def _on_signal(self) -> None:
        if self._server is None or self._state is None:
            if self._starting is not None:
                self._starting.cancel()
        elif self._draining is None:
            self._signalled = time.monotonic()
            self._draining = asyncio.ensure_future(self._drain(self._server, self._state))
        elif time.monotonic() - self._signalled > _SAME_SIGNAL_SECONDS:
            logger.warning("second signal: ending the requests in flight")
            self._state.generator.abort(_STOPPING)
            self._server.should_exit = True

    async def _drain(self, server: HttpServer, state: RouterState) -> None:
        grace = self._config.graceful_termination_timeout
        state.admission.drain()
        logger.info("draining %d requests, for at most %d s", state.admission.in_flight, grace)
        try:
            await asyncio.wait_for(state.admission.idle(), grace)
        except TimeoutError:
            count = state.admission.in_flight
            logger.warning("%d requests did not end within %d s", count, grace)
            state.generator.abort(_STOPPING)
        server.should_exit = True


def uvicorn_config(app: Starlette, config: RouterConfig) -> uvicorn.Config:
    """The configuration of uvicorn. Raises ConfigError for invalid certificates."""
    limit = app.state.router.payload_limit
    return http_server_config(app, limit, config.ssl_certfile, config.ssl_keyfile)


def _bound_socket(config: RouterConfig) -> socket.socket:
    if config.socket_fd is None:
        return bind(config.hostname, config.port)
    return socket.socket(fileno=config.socket_fd)
