"""Shard 0's side of tensor and pipeline parallelism: starts the other processes, the shards of all
stages, sends them every step, and detects when one is lost.

A shard that dies closes its sockets; one that is stopped leaves pings unanswered; one that runs
and does not compute lets the operation that waits for it time out. Each of these ends all shards
with one error that names the shard: its weights are needed by the others, and they are out of
step.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from tgi_cli import errors
from tgi_cli.config import EngineConfig
from tgi_cli.device.distributed import Shard, device_of
from tgi_cli.errors import ShardError, TgiError
from tgi_cli.logging import LEVELS
from tgi_cli.process.runtime_dir import SHARDS_PREFIX, VARIABLE
from tgi_cli.worker.tensor_parallel import messages
from tgi_cli.worker.tensor_parallel.shard_process import ShardProcess

log = logging.getLogger(__name__)

PING_SECONDS = 1.0
UNANSWERED = 5
"""Pings in a row that a serving shard may leave unanswered. They are counted, not timed: while
this process was stopped itself, or starved, late answers are no fault of the shard."""

UNANSWERED_AT_START = 60
"""The same limit while weights are loaded: libraries may hold the interpreter for seconds."""

CONNECT_SECONDS = 60.0
"""Time limit for the shards to connect, once all have loaded their weights."""

START_SECONDS = 600.0
"""Time limit of an operation during warm-up: shards are not equally fast at first use. For the
other shards it holds at any time; they end when shard 0 does."""

OPERATION_SECONDS = {"cpu": 10.0, "cuda": 60.0}
"""Time limit of an operation for shard 0 while it serves. On CUDA devices torch enforces it by
aborting the process, and :data:`CUDA_STEP_SECONDS` comes first."""

WORST_STEPS = 2
"""A stage waits for what the one before computes: so many times the worst step of the warm-up for
each stage, beside the limit of an operation."""

CUDA_STEP_SECONDS = 30
"""Time limit of a whole step on CUDA devices. A step on a CPU may take minutes if all shards
compute."""

_VERDICT_SECONDS = 2.0
"""Time limit between a failed operation and the event that explains it."""
_END_SECONDS = 5.0
"""Time limit for the shards to end before they are killed."""
_SEE_LOG = "see its log above"


class WorkerGroup:
    """The other processes. Use it from one thread, except for :meth:`watch` and :meth:`close`.

    Args:
        config: what to load, in ``config.num_processes`` processes.

    Attributes:
        shard: this process's share, connected by :meth:`connect`.
        processes: the others.

    Raises:
        ShardError: they cannot be started.
    """

    def __init__(self, config: EngineConfig) -> None:
        stages = config.pipeline_parallel_size
        device = device_of(config.device, 0)
        self.shard = Shard.of_process(0, config.num_shard, stages, device)
        self._name = config.process_name(0)
        self._stage_seconds = START_SECONDS
        self._folder: Path | None = None
        self.processes: list[ShardProcess] = []
        self._changed = threading.Condition()
        """Guards the fields below, and is notified of their changes."""
        self._lost: TgiError | None = None
        self._on_lost: Callable[[TgiError], None] | None = None
        self._pending_adapters: dict[int, _PendingAdapter] = {}
        self._serving = False
        self._closing = False
        self._step_ticks: int | None = None
        """Pings since a step began, or None between steps."""
        self._monitor = threading.Thread(target=self._monitor_shards, name="shards", daemon=True)
        try:
            for number in range(1, config.num_processes):
                self.processes.append(ShardProcess(number, config.process_name(number)))
            self._folder = Path(
                tempfile.mkdtemp(prefix=SHARDS_PREFIX, dir=os.environ.get(VARIABLE))
            )
            for process in self.processes:
                command = messages.ShardAssignment(
                    process.number, config, str(self._folder), _log_level()
                )
                process.commands.send(messages.encode(command))
            self._monitor.start()
        except OSError as error:
            self.close()
            raise ShardError(f"the shards cannot be started: {error}") from error
        except BaseException:  # SIGTERM's SystemExit, Ctrl-C
            self.close()
            raise

    # ------------------------------------------------------------------ life

    def connect(self) -> None:
        """Wait until all shards have loaded their weights, and connect to them.

        Raises:
            TgiError: the error of a shard that could not.
        """
        with self._changed:
            while not all(process.loaded for process in self.processes):
                self.check()
                self._changed.wait(1.0)  # in between, handlers of signals may run
        assert self._folder is not None
        with self.starting():
            self.shard.connect(self._folder, CONNECT_SECONDS)
            self.shard.set_timeout(START_SECONDS)

    def serve(self, step_seconds: float = 0.0) -> None:
        """Switch to the time limits of serving, after the warm-up.

        Args:
            step_seconds: of the worst step, through all stages.
        """
        seconds = OPERATION_SECONDS[self.shard.device.type]
        self._stage_seconds = seconds + WORST_STEPS * self.shard.stages * step_seconds
        self.shard.set_timeout(seconds, self._stage_seconds)
        self._serving = True

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Call ``on_lost`` once, from any thread, if a shard is lost."""
        with self._changed:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        """End the shards, wait for them, and clean up. May be called twice."""
        with self._changed:
            self._closing = True
        for process in self.processes:
            process.stop()
        end = time.monotonic() + _END_SECONDS
        for process in self.processes:
            process.wait(end - time.monotonic())
        if self._monitor.is_alive() and threading.current_thread() is not self._monitor:
            self._monitor.join()
        for process in self.processes:
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ computing together

    def send(self, command: messages.Command) -> None:
        """Send a command to all shards.

        A step of 1 / 32 / 256 rows takes 1 / 1 / 4 us to encode, and each shard 50 to 70 us on a
        busy server core, nearly all of it the system's, which wakes the shard.
        """
        data = messages.encode(command)
        for process in self.processes:
            process.commands.send(data)

    def prepare_adapter(
        self, adapter_id: int, name: str, path: str, own: Future[None]
    ) -> Future[None]:
        """Read an adapter on all shards; done when they and ``own`` are."""
        pending = _PendingAdapter(len(self.processes) + 1)
        with self._changed:
            self._pending_adapters[adapter_id] = pending
        with self.together():
            self.send(messages.PrepareAdapter(adapter_id, name, path))
        own.add_done_callback(lambda done: pending.answer(done.exception()))
        pending.future.add_done_callback(lambda _: self._pending_adapters.pop(adapter_id, None))
        return pending.future

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wrap what all shards do together before they serve.

        Raises:
            TgiError: the error of this shard, or of the one that caused the failure.
        """
        try:
            yield
        except TgiError:
            raise  # this shard's own; close() ends the others
        except Exception as error:  # whatever it is, the others may not be where this one is
            raise self._verdict(error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap a step, or a part of one: any failure in it is fatal.

        Raises:
            ShardError: names the shard that failed, and how.
        """
        self._step_ticks = 0
        try:
            yield
            self.check()  # an aborted operation on a CUDA device returns as if it had succeeded
        except ShardError:
            raise
        except Exception as error:  # as above
            raise self._verdict(error) from error
        finally:
            self._step_ticks = None

    def check(self) -> None:
        """Raises TgiError if a shard is lost (ShardError while the model serves)."""
        if self._lost is not None:
            raise self._lost

    def _verdict(self, error: Exception) -> TgiError:
        """The cause of a failed operation; a connection may break before it is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, _VERDICT_SECONDS)
        text = str(error).partition("\n")[0]
        if "timed out" in text.lower():
            seconds = OPERATION_SECONDS[self.shard.device.type]
            cause = f"a shard did not take part in a step for {seconds:g} s"
            if self.shard.stages > 1:
                cause = f"a stage did not take part in a step for {self._stage_seconds:.3g} s"
            self._lose(ShardError(cause, "see the shards' logs above"))
        else:
            self._lose(ShardError(f"{self._name}: {type(error).__name__}: {text}", _SEE_LOG))
        assert self._lost is not None
        return self._lost

    def _lose(self, error: TgiError) -> None:
        """End all shards because of ``error``, unless another error has ended them already."""
        with self._changed:
            if self._lost is not None:
                return
            if self._serving and not isinstance(error, ShardError):
                error = ShardError(error.cause, error.remedy)
            self._lost = error
            self._changed.notify_all()
            on_lost, adapters = self._on_lost, list(self._pending_adapters.values())
        for process in self.processes:
            process.popen.kill()  # an operation of gloo that waits for them fails now
        self.shard.abort()
        for pending in adapters:
            pending.answer(error)
        if on_lost is not None and not self._closing:
            on_lost(error)

    # ------------------------------------------------------------------ the monitor's thread

    def _monitor_shards(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                selector.register(process.events, selectors.EVENT_READ, process)
            due = time.monotonic()
            while self._lost is None and not self._closing:
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    try:
                        self._handle_event(key.data)
                    except (OSError, ValueError) as error:  # an incomplete or invalid message
                        cause = f"invalid message from {key.data.name}: {error}"
                        self._lose(ShardError(cause, _SEE_LOG))
                if time.monotonic() >= due:
                    due = time.monotonic() + PING_SECONDS
                    self._tick()

    def _handle_event(self, process: ShardProcess) -> None:
        """News of a shard; none is the event of its end."""
        message = process.events.receive()
        if self._closing:
            return
        if message is None:
            self._lose(process.end_error())
            return
        event = messages.decode_event(message)
        if isinstance(event, messages.Failed):
            kind = getattr(errors, event.kind, ShardError)
            self._lose(kind(f"{process.name}: {event.cause}", event.remedy or _SEE_LOG))
        elif isinstance(event, messages.AdapterPrepared):
            error = TgiError(event.cause, event.remedy) if event.cause else None
            with self._changed:
                pending = self._pending_adapters.get(event.adapter_id)
            if pending is not None:  # else another shard has failed to read it
                pending.answer(error)
        elif isinstance(event, messages.Loaded):
            with self._changed:
                process.loaded = True
                self._changed.notify_all()
        else:
            process.unanswered = 0

    def _tick(self) -> None:
        """Ping all shards; end them if one has not answered for too long."""
        limit = UNANSWERED if self._serving else UNANSWERED_AT_START
        for process in self.processes:
            if process.unanswered >= limit:
                cause = f"{process.name} has not answered for {limit * PING_SECONDS:g} s"
                self._lose(ShardError(cause, "it was stopped, or it hangs"))
                return
            process.ping()
        ticks = self._step_ticks
        if ticks is not None and self._serving and self.shard.device.type == "cuda":
            self._step_ticks = ticks + 1
            if ticks * PING_SECONDS >= CUDA_STEP_SECONDS:
                cause = f"a step has not ended within {CUDA_STEP_SECONDS} s"
                self._lose(ShardError(cause, "see the shards' logs above"))


def _log_level() -> str:
    """The name of this process's log level."""
    level = log.getEffectiveLevel()
    return next((name for name in LEVELS if getattr(logging, name, 0) >= level), LEVELS[-1])


class _PendingAdapter:
    """An adapter that all shards read: a future of their answers."""

    def __init__(self, shards: int) -> None:
        self.future: Future[None] = Future()
        self._missing = shards
        self._lock = threading.Lock()

    def answer(self, error: BaseException | None) -> None:
        """Count a shard that has read it, or fail with the error of one that could not."""
        with self._lock:
            self._missing -= 1
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            elif not self._missing:
                self.future.set_result(None)
