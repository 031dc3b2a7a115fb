"""``tgi serve`` of several models: the process in front of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from functools import partial

import anyio
import uvloop
from starlette.applications import Starlette
from starlette.middleware import Middleware

from tgi_cli.errors import ExitCode, ShardError
from tgi_cli.launcher.child_process import adopt_orphans
from tgi_cli.multi_model.config import MultiModelConfig
from tgi_cli.multi_model.model_manager import ModelManager
from tgi_cli.multi_model.model_process import ModelProcess
from tgi_cli.multi_model.proxy import ModelProxy
from tgi_cli.multi_model.routes import ROUTES, FrontState
from tgi_cli.multi_model.tracing import ForwardTracing
from tgi_cli.process import bind
from tgi_cli.process.parent_death import parent_pipe
from tgi_cli.process.resident_memory import limit_arenas, release_file_pages, trim_heap
from tgi_cli.process.units import format_memory
from tgi_cli.router.http import errors
from tgi_cli.router.http.auth import ApiKeyMiddleware
from tgi_cli.router.http.cors import cors
from tgi_cli.router.http.error_handlers import error_handlers
from tgi_cli.router.http.http_server import BACKLOG, HttpServer, http_server_config
from tgi_cli.router.observability.middleware import ObservabilityMiddleware

log = logging.getLogger(__name__)

_ARENAS = 2


def serve_models(config: MultiModelConfig) -> int:
    """Serve several models until a signal; the first one is loaded before the port listens.

    The first signal drains: requests have ``graceful_termination_timeout`` seconds. A second one
    ends them at once.

    Returns:
        The exit code: 0 after a signal, or 130 after a second one.

    Raises:
        AddressInUseError: The port is taken.
        ShardError: The first model cannot be loaded.
    """
    limit_arenas(_ARENAS)
    adopt_orphans()
    return uvloop.run(_Front(config).run())


def create_app(manager: ModelManager, config: MultiModelConfig) -> Starlette:
    """The application in front of the models; ``app.state.proxy`` forwards requests."""
    tracing = None
    if config.otlp_endpoint is not None:
        tracing = ForwardTracing(config.otlp_endpoint, config.otlp_service_name)
    middleware = [
        Middleware(ObservabilityMiddleware, tracing=tracing),
        cors(config.cors_allow_origin),
    ]
    if config.api_keys:
        middleware.append(Middleware(ApiKeyMiddleware, keys=config.api_keys, routes=ROUTES))
    app = Starlette(routes=ROUTES, middleware=middleware, exception_handlers=error_handlers())
    app.router.redirect_slashes = False
    app.state.front = FrontState(manager)
    app.state.guarded = bool(config.api_keys)
    app.state.tracing = tracing
    app.state.proxy = app.router.default = ModelProxy(manager, config.payload_limit)
    return app


class _Front:
    """One run: loading the first model, serving and draining."""

    def __init__(self, config: MultiModelConfig) -> None:
        self._config = config
        self._signalled = asyncio.Event()
        self._again = asyncio.Event()

    async def run(self) -> int:
        """See :func:`serve_models`."""
        config = self._config
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)
        with bind.bind(config.hostname, config.port) as listener, parent_pipe() as parent_fd:
            host, port = bind.local_address(listener)
            bind.warn_if_open(config.hostname, port, config.api_key, config.cors_allow_origin)
            start = partial(ModelProcess, parent_fd=parent_fd, api_key=config.api_key)
            manager = ModelManager(config.models, config.policy, start)
            app = create_app(manager, config)
            async with anyio.create_task_group():  # imports anyio's backend
                pass
            log.info(
                "%d models, %s for those that are loaded",
                len(config.models),
                format_memory(config.policy.budget),
            )
            try:
                if not await self._load_first(manager):
                    return ExitCode.OK
                listener.listen(BACKLOG)
                # Exempt what exists by now, which lives as long as the process, from collections,
                # which would hold the loop for tens of milliseconds.
                gc.collect()
                gc.freeze()
                trim_heap()
                release_file_pages()
                names = ",".join(manager.specs)
                url = bind.url(host, port, config.ssl_certfile is not None)
                extra = {"url": url, "start_seconds": round(time.monotonic() - began, 3)}
                log.info("ready: %s on %s", names, url, extra=extra)
                server = HttpServer(
                    http_server_config(
                        app, config.payload_limit, config.ssl_certfile, config.ssl_keyfile
                    )
                )
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                await self._until_drained(app)
                server.should_exit = True
                server.force_exit = self._again.is_set()
                await serving
            finally:
                await manager.close()
                if app.state.tracing is not None:
                    await asyncio.to_thread(app.state.tracing.close)
        if self._again.is_set():
            return ExitCode.INTERRUPTED
        log.info("stopped")
        return ExitCode.OK

    async def _load_first(self, manager: ModelManager) -> bool:
        """Load the default model; False if a signal came first. Raises ShardError."""
        loading = asyncio.create_task(manager.until_loaded(next(iter(manager.specs))))
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait({loading, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not loading.done():
            loading.cancel()
            return False
        try:
            loading.result()
        except errors.ApiError as error:
            raise ShardError(error.message, "see its log above") from error
        return True

    async def _until_drained(self, app: Starlette) -> None:
        """Serve until a signal, then until the requests are done, or their time is up."""
        await self._signalled.wait()
        app.state.front.draining = True
        proxy: ModelProxy = app.state.proxy
        grace = self._config.graceful_termination_timeout
        log.info("draining %d requests, for at most %d s", proxy.in_flight, grace)
        proxy.draining = True
        again = asyncio.create_task(self._again.wait())
        idle = asyncio.create_task(proxy.idle())
        await asyncio.wait({again, idle}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            log.warning("%d requests did not end in time", proxy.in_flight)
        again.cancel()
        idle.cancel()

    def _on_signal(self) -> None:
        if self._signalled.is_set():
            self._again.set()
        self._signalled.set()
