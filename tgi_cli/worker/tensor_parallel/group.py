"""Shard 0's side of tensor and pipeline parallelism: starts the other processes, the shards of all
stages, or awaits those of other nodes, sends them every step, and detects when one is lost.

A shard that dies closes its sockets; one that is stopped leaves pings unanswered; one that runs
and does not compute lets the operation that waits for it time out. Each of these ends all shards
with one error that names the shard: its weights are needed by the others, and they are out of
step.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from tgi_cli import errors
from tgi_cli.config import EngineConfig
from tgi_cli.device.distributed import LOOPBACK, Shard, device_of
from tgi_cli.errors import ShardError, TgiError
from tgi_cli.logging import LEVELS
from tgi_cli.worker.tensor_parallel import messages
from tgi_cli.worker.tensor_parallel.connected_node import ConnectedNode
from tgi_cli.worker.tensor_parallel.end_errors import SEE_LOG
from tgi_cli.worker.tensor_parallel.node_listener import NodeListener
from tgi_cli.worker.tensor_parallel.node_messages import ProcessEnded
from tgi_cli.worker.tensor_parallel.pending_adapter import PendingAdapter
from tgi_cli.worker.tensor_parallel.shard_process import LocalShardProcess, ShardProcess
from tgi_cli.worker.tensor_parallel.stores import LeaderStore

log = logging.getLogger(__name__)

PING_SECONDS = 1.0
UNANSWERED = 5
"""Pings in a row that a serving shard may leave unanswered. They are counted, not timed: while
this process was stopped itself, or starved, late answers are no fault of the shard."""

UNANSWERED_AT_START = 60
"""The same limit while weights are loaded: libraries may hold the interpreter for seconds."""

WAITING_SECONDS = 30.0
"""Interval between log messages about nodes that have not connected yet."""

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


class WorkerGroup:
    """The other processes. Use it from one thread, except for :meth:`watch` and :meth:`close`.

    Args:
        config: what to load, in ``config.num_processes`` processes.
        listener: accepts the other nodes, if there are several.

    Attributes:
        shard: this process's share, connected by :meth:`connect`.
        processes: the others; those of other nodes once they have connected.

    Raises:
        ShardError: they cannot be started.
    """

    def __init__(self, config: EngineConfig, listener: NodeListener | None = None) -> None:
        stages = config.pipeline_parallel_size
        device = device_of(config.device, 0)
        self.shard = Shard.of_process(0, config.num_shard, stages, device, config.nnodes)
        self._config = config
        self._name = config.process_name(0)
        self._stage_seconds = START_SECONDS
        self._store = LeaderStore()
        self._listener = listener
        self.processes: list[ShardProcess] = []
        self._changed = threading.Condition()
        """Guards the fields below, and is notified of their changes."""
        self._lost: TgiError | None = None
        self._on_lost: Callable[[TgiError], None] | None = None
        self._pending_adapters: dict[int, PendingAdapter] = {}
        self._serving = False
        self._closing = False
        self._step_ticks: int | None = None
        """Pings since a step began, or None between steps."""
        self._monitor = threading.Thread(target=self._monitor_shards, name="shards", daemon=True)
        try:
            for number in range(1, config.local_processes):
                self.processes.append(LocalShardProcess(number, config.process_name(number)))
            for process in self.processes:
                self._assign(process)
            if listener is not None:
                listener.start(self._add)
            self._monitor.start()
        except OSError as error:
            self.close()
            raise ShardError(f"the shards cannot be started: {error}") from error
        except BaseException:  # SIGTERM's SystemExit, Ctrl-C
            self.close()
            raise

    def _assign(self, process: ShardProcess) -> None:
        """Tell a process what to load."""
        assignment = messages.ShardAssignment(process.number, self._config, _log_level())
        process.commands.send(messages.encode(assignment))

    def _add(self, process: ShardProcess) -> None:
        """A process of another node has connected."""
        self._assign(process)
        with self._changed:
            self.processes.append(process)
            self._changed.notify_all()

    # ------------------------------------------------------------------ life

    def connect(self) -> None:
        """Wait until all shards have loaded their weights, and connect to them.

        Raises:
            TgiError: the error of a shard that could not.
        """
        others = self._config.num_processes - 1
        due = time.monotonic()
        with self._changed:
            while sum(process.loaded for process in self.processes) < others:
                self.check()
                if self._listener is not None and time.monotonic() >= due:
                    due = time.monotonic() + WAITING_SECONDS
                    self._listener.log_missing()
                self._changed.wait(1.0)  # in between, handlers of signals may run
        host = LOOPBACK
        if self._listener is not None:
            self._listener.stop_listening()
            host = self._listener.address
        with self.starting():
            self.shard.connect(self._store, CONNECT_SECONDS, host)
            self.shard.set_timeout(START_SECONDS)

    def places(self) -> tuple[str, ...]:
        """Which stages each node has, for reports; empty on one node."""
        return () if self._listener is None else self._listener.places()

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
        self._store.fail()
        for process in self.processes:
            process.stop()
        if self._listener is not None:
            self._listener.close()
        end = time.monotonic() + _END_SECONDS
        for process in self.processes:
            process.wait(end - time.monotonic())
        if self._monitor.is_alive() and threading.current_thread() is not self._monitor:
            self._monitor.join()
        for process in self.processes:
            process.close()

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
        pending = PendingAdapter(len(self.processes) + 1)
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
            self._lose(ShardError(f"{self._name}: {type(error).__name__}: {text}", SEE_LOG))
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
        self._store.fail()
        for process in self.processes:
            process.kill()  # an operation of gloo that waits for them fails now
        if self._listener is not None:
            self._listener.close()
        self.shard.abort()
        for pending in adapters:
            pending.answer(error)
        if on_lost is not None and not self._closing:
            on_lost(error)

    # ------------------------------------------------------------------ the monitor's thread

    def _monitor_shards(self) -> None:
        with selectors.DefaultSelector() as selector:
            due = time.monotonic()
            while self._lost is None and not self._closing:
                if time.monotonic() >= due:
                    due = time.monotonic() + PING_SECONDS
                    self._register(selector)
                    self._tick()
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    source = key.data
                    try:
                        if isinstance(source, ConnectedNode):
                            self._handle_node(source)
                        else:
                            self._handle_event(source)
                    except (OSError, ValueError) as error:  # an incomplete or invalid message
                        cause = f"invalid message from {source.name}: {error}"
                        self._lose(ShardError(cause, SEE_LOG))

    def _others(self) -> list[ShardProcess | ConnectedNode]:
        """The processes and the nodes that have connected by now."""
        return [*self.processes, *([] if self._listener is None else self._listener.connected())]

    def _register(self, selector: selectors.BaseSelector) -> None:
        """Watch those that have connected since the last time."""
        known = {id(key.data) for key in selector.get_map().values()}
        for other in self._others():
            if id(other) not in known:
                channel = other.channel if isinstance(other, ConnectedNode) else other.events
                selector.register(channel, selectors.EVENT_READ, other)

    def _handle_node(self, node: ConnectedNode) -> None:
        """A node answers a ping, reports that a process has ended, or is gone."""
        news = node.receive()
        if self._closing:
            return
        if news is None:
            self._lose(node.lost_error())
        elif isinstance(news, ProcessEnded):
            name = self._config.process_name(news.process)
            self._lose(node.process_error(news.process, name))

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
            self._lose(kind(f"{process.name}: {event.cause}", event.remedy or SEE_LOG))
        elif isinstance(event, messages.AdapterPrepared):
            error = TgiError(event.cause, event.remedy) if event.cause else None
            with self._changed:
                pending = self._pending_adapters.get(event.adapter_id)
            if pending is not None:  # else another shard has failed to read it
                pending.answer(error)
        elif isinstance(event, messages.StoreSet | messages.StoreGet):
            self._store.handle(event, process.events)
        elif isinstance(event, messages.Loaded):
            with self._changed:
                process.loaded = True
                self._changed.notify_all()
        else:
            process.unanswered = 0

    def _tick(self) -> None:
        """Ping all shards and nodes; end them if one has not answered for too long."""
        limit = UNANSWERED if self._serving else UNANSWERED_AT_START
        for other in self._others():
            if other.unanswered >= limit:
                cause = f"{other.name} has not answered for {limit * PING_SECONDS:g} s"
                self._lose(ShardError(cause, "it was stopped, or it hangs"))
                return
            other.ping()
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
