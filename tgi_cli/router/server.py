"""The router's process: connect to the engine, then serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial

import uvicorn
import uvloop
from starlette.applications import Starlette

import tgi_cli.logging
from tgi_cli.errors import AddressInUseError, RouterError
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.http.protocol import BoundedProtocol, body_seconds
from tgi_cli.router.http.tls import server_context
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.text.bundle import TextBundle

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that it is they who close them."""
_STOPPING = "the server is shutting down"
_SAME_SECONDS = 1.0
"""Signals that come so soon after the first are the same: a service manager that sends it to all
processes sends it to the launcher too, which passes it on."""
_LAST_SECONDS = 5
"""For the last bytes of answers that are complete, behind the grace period."""


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT; return when what was in flight is done.

    The port does not listen before the engine is ready. The first signal drains: new requests
    get 503, those in flight have ``graceful_termination_timeout`` seconds. Another, more than a
    second later, ends those too.

    Raises:
        AddressInUseError: the port cannot be bound.
        ConfigError: a certificate or its key cannot be used, traces cannot be sent, or the engine's
            address is none.
        ModelError: the tokenizer or the chat template is missing or unreadable.
        ShardError: TLS keeps the router and the engine apart.
        RouterError: the server stopped by itself.
    """
    tgi_cli.logging.setup("router", config.logger_level, config.json_output)
    with _listening_socket(config) as listener:
        uvloop.run(_Router(config, listener).run())


class _Router:
    """One run: starting, serving, draining."""

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._server: _Server | None = None
        self._state: RouterState | None = None
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._told = 0.0
        """When it was told to end."""

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
        text = await asyncio.to_thread(
            TextBundle.load,
            config.model_path,
            config.trust_remote_code,
            tokenizer_config_path=config.tokenizer_config_path,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        client = await GrpcEngineClient.connect(
            config.engine_url,
            None,
            stall_seconds=config.watchdog_timeout,
            tls=config.engine_tls,
        )
        try:
            app = create_app(client, text, config)
            self._state = app.state.router
            try:
                self._listener.listen(_BACKLOG)
            except OSError as error:
                raise _address_error(config, error) from error
            # What lives by now lives for good; the collector need not look at it again.
            gc.collect()
            gc.freeze()
            self._server = _Server(uvicorn_config(app, config))
            host, port = self._listener.getsockname()[:2]
            scheme = "https" if config.ssl_certfile else "http"
            logger.info("listening on %s port %d (%s)", host, port, scheme)
            await self._server.serve(sockets=[self._listener])
            if self._draining is None:
                raise RouterError("the HTTP server stopped by itself", "see the log above")
        finally:
            if self._state is not None:
                self._state.workers.close()
                self._state.adapters.kept.close()
                if self._state.generator.grammars is not None:
                    self._state.generator.grammars.close()
                if self._state.text.chat_template is not None:
                    self._state.text.chat_template.close()
                if self._state.tracing is not None:
                    await asyncio.to_thread(self._state.tracing.close)
            await client.close()

    def _on_signal(self) -> None:
        if self._server is None or self._state is None:
            if self._starting is not None:
                self._starting.cancel()
        elif self._draining is None:
            self._told = time.monotonic()
            self._draining = asyncio.ensure_future(self._drain(self._server, self._state))
        elif time.monotonic() - self._told > _SAME_SECONDS:
            logger.warning("second signal: ending what is in flight")
            self._state.generator.abort(_STOPPING)
            self._server.should_exit = True

    async def _drain(self, server: _Server, state: RouterState) -> None:
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


class _Server(uvicorn.Server):
    """Leaves the signals to us: uvicorn would stop listening at once instead of draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def uvicorn_config(app: Starlette, config: RouterConfig) -> uvicorn.Config:
    """How uvicorn serves the app. Raises ConfigError for files that TLS cannot use."""
    server = uvicorn.Config(
        app,
        http=partial(BoundedProtocol, body_seconds=body_seconds(config.payload_limit)),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    server.load()
    if config.ssl_certfile is not None:
        server.ssl = server_context(config.ssl_certfile, config.ssl_keyfile)
    return server


def _listening_socket(config: RouterConfig) -> socket.socket:
    """The socket to serve on, bound and not yet listening. Raises AddressInUseError."""
    try:
        if config.socket_fd is not None:
            listener = socket.socket(fileno=config.socket_fd)
        else:
            family, kind, protocol, _, address = socket.getaddrinfo(
                config.hostname, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
            except OSError:
                listener.close()
                raise
    except OSError as error:
        raise _address_error(config, error) from error
    listener.setblocking(False)
    return listener


def _address_error(config: RouterConfig, error: OSError) -> AddressInUseError:
    return AddressInUseError(
        f"cannot serve on {config.hostname} port {config.port}: {error.strerror or error}",
        "stop what uses it, or choose another --hostname or --port",
    )
