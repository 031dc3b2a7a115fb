"""The model server's process: load, warm up, open the socket, run the engine's loop.

The socket exists only while the engine can serve: whoever connects is answered.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING

from tgi_cli.config import ServeConfig
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import Shutdown
from tgi_cli.errors import ShardError
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.limits_report import log_limits
from tgi_cli.model_server.load_progress import LoadProgress
from tgi_cli.model_server.startup import Startup
from tgi_cli.model_server.worker_failure import stop_on_worker_failure
from tgi_cli.process import unix_socket
from tgi_cli.process.heartbeat import HeartbeatWriter, SharedHeartbeat, State
from tgi_cli.process.signals import delivered

if TYPE_CHECKING:
    from tgi_cli.model_server.tcp_listener import TcpListen
    from tgi_cli.tgi_grpc.mount import GenerateOptions
    from tgi_cli.worker.tensor_parallel.worker import ShardedWorker
    from tgi_cli.worker.worker import ModelWorker

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


def run_model_server(
    serve: ServeConfig,
    model_path: Path,
    uds_path: Path,
    generate: GenerateOptions | None = None,
    listen: TcpListen | None = None,
    pulse: SharedHeartbeat | None = None,
) -> None:
    """Serve a model on a unix socket until SIGTERM or SIGINT; requests in flight finish first.

    They get ``serve.graceful_termination_timeout`` seconds; a second signal ends them at once.
    Call it in the process's main thread. ``generate`` has TGI's own services served as well,
    ``listen`` has all of them on TCP too; ``pulse`` shows who watches that it moves.

    Raises:
        TgiError: the model cannot be loaded, does not fit, or an address cannot be bound.
        ShardError: the engine failed while it served.
    """
    _claim(uds_path, generate, listen)
    from tgi_cli.worker.worker import load_worker

    signal.signal(signal.SIGTERM, _leave)
    with HeartbeatWriter(pulse).beating() as heart:
        with LoadProgress(serve.json_output) as progress:
            worker, config = load_worker(serve, model_path, progress)
        try:
            _serve(serve, uds_path, worker, config.max_total_tokens, generate, listen, heart)
        finally:
            worker.close()


def _serve(
    serve: ServeConfig,
    uds_path: Path,
    worker: ModelWorker | ShardedWorker,
    context: int,
    generate: GenerateOptions | None,
    listen: TcpListen | None,
    heart: HeartbeatWriter,
) -> None:
    """Warm up and serve; ``context`` is what a request may take if the memory allows."""
    heart.enter(State.WARMING_UP)
    capacity = worker.warmup()
    log_limits(serve, context, capacity)
    config = capacity.config
    limits = SchedulerConfig.of(config, capacity.num_blocks, capacity.kv_window)
    depth = 0 if config.device == "cpu" else 1
    engine = EngineCore(
        worker,
        limits,
        depth,
        compiler=worker.grammars,
    )
    # What lives now lives for ever: the collector need not walk the model again.
    gc.collect()
    gc.freeze()
    server = EngineServer(engine, worker.info(), config.max_loras)
    heart.publish(asdict(worker.info()))
    if generate is not None:
        from tgi_cli.tgi_grpc.mount import GenerateServices  # which not every server has

        server.fronts.append(
            GenerateServices(engine.inbox, worker.info(), server.adapters, generate, uds_path)
        )
    if listen is not None:
        server.fronts.append(listen)
    signals: SimpleQueue[signal.Signals] = SimpleQueue()
    threading.Thread(
        target=_shut_down,
        args=(signals, engine, server, serve.graceful_termination_timeout, heart),
        name="shutdown",
        daemon=True,
    ).start()

    def opened() -> None:
        where = f"{config.num_shard} shards on {config.device}"
        log.info(
            "ready: %s in %s on %s, %d tokens in the cache, loaded in %.1f s, warmed up in %.1f s",
            config.model_id,
            config.dtype,
            where if config.num_shard > 1 else config.device,
            capacity.max_batch_total_tokens,
            capacity.load_seconds,
            capacity.warmup_seconds,
        )

    cause = ""
    with delivered((signal.SIGTERM, signal.SIGINT), signals.put):
        opening = Startup(
            server, serve.lora_adapters, uds_path, opened, lambda: engine.inbox.put(Shutdown())
        )
        try:
            heart.watch(engine, capacity.step_seconds)
            with stop_on_worker_failure(worker, engine, server):
                engine.run()
        except ShardError as error:
            cause = error.cause
            raise
        except RuntimeError as error:
            cause = f"the engine failed: {error}"
            raise ShardError(cause, "its log above says why each step failed") from error
        finally:
            opening.join()
            server.stop(cause or "the model server has stopped")
        if opening.error is not None:
            raise opening.error


def _claim(uds_path: Path, generate: GenerateOptions | None, listen: TcpListen | None) -> None:
    """An address that cannot be bound is known before a model is loaded."""
    unix_socket.claim(uds_path)
    if generate is not None and generate.socket is not None:
        from tgi_cli.tgi_grpc import mount

        mount.claim(generate.socket)
    if listen is not None:
        listen.claim()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM while nothing is served yet: nothing to finish."""
    sys.exit(0)


def _shut_down(
    signals: SimpleQueue[signal.Signals],
    engine: EngineCore,
    server: EngineServer,
    grace: float,
    heart: HeartbeatWriter,
) -> None:
    """After a signal: refuse what is new, let the rest finish in time, end the loop."""
    signals.get()
    heart.enter(State.DRAINING)
    server.drain()
    end = time.monotonic() + grace
    while (live := _live(engine)) and signals.empty() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    if live:
        log.warning("cancelling %d requests that have not finished", live)
    engine.inbox.put(Shutdown())


def _live(engine: EngineCore) -> int:
    """Requests that somebody waits for."""
    return engine.live_requests + engine.driven_requests
