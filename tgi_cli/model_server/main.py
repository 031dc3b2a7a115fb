"""The model server's process: load, warm up, open the socket, run the engine's loop.

The socket exists only while the engine can serve: every client that connects gets an answer.
"""

from __future__ import annotations

import gc
import linecache
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.disk_blocks import open_disk_blocks
from tgi_cli.engine.messages import Fail, Shutdown
from tgi_cli.engine.speculation import create_speculator
from tgi_cli.errors import ExitCode, ShardError, TgiError
from tgi_cli.model_server.adapters import EngineEndedError
from tgi_cli.model_server.config import ModelServerConfig
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.grpc_service import ServedEngine, ServiceFactory
from tgi_cli.model_server.request_spans import open_request_spans
from tgi_cli.process import unix_socket
from tgi_cli.process.heartbeat import HeartbeatWriter, SharedHeartbeat, State
from tgi_cli.process.imports import importing
from tgi_cli.process.minimal_torch import import_minimal_torch
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.process.resident_memory import limit_arenas, release_file_pages, trim_heap
from tgi_cli.process.signals import delivered, exiting_on

if TYPE_CHECKING:
    from tgi_cli.worker.sizing.kv_cache import Capacity
    from tgi_cli.worker.tensor_parallel.worker import ShardedWorker
    from tgi_cli.worker.worker import ModelWorker

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_HANG_SECONDS = 5.0
"""Time for the loop to end after a worker failed. By then every operation that waits for the lost
process has failed, except one that hangs in a driver."""
_ARENAS = 2
"""Arenas of malloc. One thread computes; those that handle calls allocate little."""
_BAR_DELAY = 1.0
"""Loading that takes less time than this needs no progress bar."""


def run_model_server(
    server_config: ModelServerConfig, services: Sequence[ServiceFactory] = ()
) -> None:
    """Serve a model on a unix socket until SIGTERM or SIGINT; requests in flight finish first.

    They get ``graceful_termination_timeout`` seconds; a second signal ends them at once. Call it
    in the process's main thread.

    Args:
        server_config: What to serve, and where.
        services: Services besides the engine's own.

    Raises:
        TgiError: The model cannot be loaded, does not fit, or an address cannot be bound.
        ShardError: The engine failed while it served.
    """
    unix_socket.claim(server_config.uds_path)
    limit_arenas(_ARENAS)
    fd = server_config.heartbeat_fd
    with importing():
        import_minimal_torch()
        from tgi_cli.worker.factory import load_worker
    release_file_pages()  # of what imports alone have run: they would add to the peak of loading
    serve = server_config.serve
    memory = None if fd is None else SharedHeartbeat.attach(fd)
    with (
        exiting_on(signal.SIGTERM),
        HeartbeatWriter(memory).beating() as heartbeat,
        _publishing_errors(heartbeat),
    ):
        show_bar = False if serve.json_output else None
        with ProgressReporter(show_bar=show_bar, delay=_BAR_DELAY, transient=True) as progress:
            progress.start("loading weights", 0)
            worker, config = load_worker(serve, server_config.model_path, progress.update)
        try:
            _serve(server_config, services, worker, config.max_total_tokens, heartbeat)
        finally:
            worker.close()


@contextmanager
def _publishing_errors(heartbeat: HeartbeatWriter) -> Iterator[None]:
    """Let the launcher have the cause of an error that ends the process."""
    try:
        yield
    except TgiError as error:
        heartbeat.publish_error(error.cause)
        raise


def _serve(
    server_config: ModelServerConfig,
    services: Sequence[ServiceFactory],
    worker: ModelWorker | ShardedWorker,
    max_total_tokens: int,
    heartbeat: HeartbeatWriter,
) -> None:
    """Warm up and serve; ``max_total_tokens`` is the limit of a request if the memory allows."""
    from tgi_cli.model_server.limits_report import log_limits  # imports torch

    serve, uds_path = server_config.serve, server_config.uds_path
    heartbeat.enter(State.WARMING_UP)
    capacity = worker.warmup()
    log_limits(serve, max_total_tokens, capacity)
    config = capacity.config
    blocks = open_disk_blocks(config, worker, capacity.cache_bytes, capacity.step_seconds)
    spans = open_request_spans(serve, server_config.replica)
    engine = EngineCore(
        worker,
        SchedulerConfig.after_warmup(capacity),
        config.depth,
        compiler=worker.grammars,
        speculator=create_speculator(config, capacity.step_times, capacity.most_proposed),
        external_drafts=serve.asks_for_drafts,
        on_idle=trim_heap,
        blocks=blocks,
    )
    # Everything that lives now lives until the end: the collector need not walk the model again.
    linecache.clearcache()  # of sources that imports have looked into
    gc.collect()
    gc.freeze()
    trim_heap()
    info = worker.info()
    server = EngineServer(engine, info, config.max_loras, spans)
    heartbeat.publish(asdict(info))
    served = ServedEngine(engine.inbox, info, server.adapters, uds_path)
    server.services += [create(served) for create in services]
    signals: SimpleQueue[signal.Signals] = SimpleQueue()
    threading.Thread(
        target=shut_down,
        args=(signals, engine, server, serve.graceful_termination_timeout, heartbeat),
        name="shutdown",
        daemon=True,
    ).start()

    def on_opened(opened: Future[bool]) -> None:
        if opened.exception() is not None:
            engine.inbox.put(Shutdown())
        elif opened.result():
            release_file_pages()
            _log_ready(capacity)

    cause = ""
    with delivered((signal.SIGTERM, signal.SIGINT), signals.put):
        opened = open_socket(server, serve.lora_adapters, uds_path)
        opened.add_done_callback(on_opened)
        try:
            heartbeat.watch(engine, capacity.step_seconds)
            with _stop_on_worker_failure(worker, engine, server):
                engine.run()
        except ShardError as error:
            cause = error.cause
            raise
        except RuntimeError as error:
            cause = f"the engine failed: {error}"
            raise ShardError(cause, "see the errors of its steps in the log above") from error
        finally:
            wait([opened])  # soon, once the engine's loop has ended
            server.stop(cause or "the model server has stopped")
            if blocks is not None:
                blocks.close()
            if spans is not None:
                spans.close()
        opened.result()


def _log_ready(capacity: Capacity) -> None:
    config = capacity.config
    where = f"{config.num_shard} shards on {config.device}"
    if config.num_shard == 1:
        where = config.device
    if config.pipeline_parallel_size > 1:
        where = f"{config.pipeline_parallel_size} stages of {where}"
    log.info(
        "ready: %s in %s on %s, %d tokens in the cache, loaded in %.1f s, warmed up in %.1f s",
        config.model_id,
        config.dtype,
        where,
        capacity.max_batch_total_tokens,
        capacity.load_seconds,
        capacity.warmup_seconds,
    )


def open_socket(server: EngineServer, adapters: Sequence[str], path: Path) -> Future[bool]:
    """Load adapters and open the socket, in a thread beside the engine's loop.

    Args:
        server: Not started yet.
        adapters: Each ``name=path``.
        path: Path of the socket.

    Returns:
        Whether the socket is open, once that is known: False if the engine ended first, or the
        error that prevented it.
    """
    opened: Future[bool] = Future()

    def run() -> None:
        try:
            for item in adapters:
                name, _, folder = item.partition("=")
                server.adapters.load(name, partial(Path, folder))
            server.start(path)
        except EngineEndedError:
            opened.set_result(False)  # a signal came first, or the loop reports why it ended
        except BaseException as error:  # whatever it is, the main thread raises it
            opened.set_exception(error)
        else:
            opened.set_result(True)

    server.listen_to_engine()
    threading.Thread(target=run, name="startup", daemon=True).start()
    return opened


class _WatchedWorker(Protocol):
    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Have ``on_lost`` called, once and from any thread, when the worker is lost."""
        ...


@contextmanager
def _stop_on_worker_failure(
    worker: _WatchedWorker, engine: EngineCore, server: EngineServer
) -> Iterator[None]:
    """Around the engine's loop: end it when the worker is lost, whatever the loop waits for.

    If the loop hangs, the process exits once clients have their errors.
    """
    ended = threading.Event()

    def end(error: TgiError) -> None:
        engine.inbox.put(Fail(error.cause, error.remedy))
        if not ended.wait(_HANG_SECONDS):
            server.stop(error.cause)
            log.error("%s; a step hangs on the device, ending the process", error.cause)
            os._exit(ExitCode.SHARD_FAILED)

    def on_lost(error: TgiError) -> None:
        threading.Thread(target=end, args=(error,), name="worker failure", daemon=True).start()

    worker.watch(on_lost)
    try:
        yield
    finally:
        ended.set()


def shut_down(
    signals: SimpleQueue[signal.Signals],
    engine: EngineCore,
    server: EngineServer,
    grace: float,
    heartbeat: HeartbeatWriter,
) -> None:
    """After a signal: refuse new requests, let the others finish in time, end the loop."""
    signals.get()
    heartbeat.enter(State.DRAINING)
    server.drain()
    end = time.monotonic() + grace
    while (
        (live := max(engine.live_requests, server.live_requests) + engine.driven_requests)
        and signals.empty()
        and time.monotonic() < end
    ):
        time.sleep(_POLL_SECONDS)
    if live:
        log.warning("cancelling %d requests that have not finished", live)
    engine.inbox.put(Shutdown())
