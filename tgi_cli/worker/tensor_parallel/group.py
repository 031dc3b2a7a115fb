"""Shard 0's side of tensor parallelism: it starts the other shards, tells them every step, and
notices when one is lost.

A shard that dies closes its sockets; one that is stopped leaves pings unanswered; one that runs
and does not compute lets the operation that waits for it time out. Each ends all of them, with
one error that names the shard: what one holds is of no use without the others, and where they
stand in a step is not known any more.
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
"""Pings in a row, of a shard that serves. They are counted rather than timed: when this process
was stopped itself, or starved, nobody is to blame for late answers."""

UNANSWERED_AT_START = 60
"""The same while weights are loaded: libraries may hold the interpreter for seconds."""

MEETING_SECONDS = 60.0
"""That the shards may take to meet, once all have loaded their weights."""

START_SECONDS = 600.0
"""That an operation may take while the model is warmed up: shards are not equally fast at first
use. The others wait for shard 0 so long at any time; they end when it does."""

OPERATION_SECONDS = {"cpu": 10.0, "cuda": 60.0}
"""The same for shard 0 while it serves. On a CUDA device its end is torch's (it aborts the
process), and comes after
"""
CUDA_STEP_SECONDS = 30
"""that a whole step may take there. On a CPU a step may take minutes, if all shards compute."""

_VERDICT_SECONDS = 2.0
"""Between an operation that fails and the event that explains it."""
_END_SECONDS = 5.0
"""That the shards may take to end before they are killed."""
_SEE_LOG = "see its log above"


class WorkerGroup:
    """The other shards. To be used from one thread, but for :meth:`watch` and :meth:`close`.

    Args:
        config: what to load; ``config.num_shard`` says by how many.

    Attributes:
        shard: this process's place; :meth:`connect` lets it meet the others.

    Raises:
        ShardError: they cannot be started.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.shard = Shard(0, config.num_shard, device_of(config.device, 0))
        self._folder: Path | None = None
        self._processes: list[ShardProcess] = []
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._lost: TgiError | None = None
        self._on_lost: Callable[[TgiError], None] | None = None
        self._preparing: dict[int, _Preparation] = {}
        self._serving = False
        self._closing = False
        self._step_ticks: int | None = None
        """Pings since a step began; None: between steps."""
        self._monitor = threading.Thread(target=self._watch_over, name="shards", daemon=True)
        try:
            for rank in range(1, config.num_shard):
                self._processes.append(ShardProcess(rank))
            self._folder = Path(
                tempfile.mkdtemp(prefix=SHARDS_PREFIX, dir=os.environ.get(VARIABLE))
            )
            for process in self._processes:
                command = messages.ShardAssignment(
                    process.rank, config, str(self._folder), _log_level()
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
        """Wait until all have loaded their weights, and meet them.

        Raises:
            TgiError: why one of them could not.
        """
        with self._changed:
            while not all(process.loaded for process in self._processes):
                self.check()
                self._changed.wait(1.0)  # in between, handlers of signals may run
        assert self._folder is not None
        with self.starting():
            self.shard.connect(self._folder, MEETING_SECONDS)
            self.shard.set_timeout(START_SECONDS)

    def serve(self) -> None:
        """The model is warmed up: from now on steps are quick."""
        self.shard.set_timeout(OPERATION_SECONDS[self.shard.device.type])
        self._serving = True

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Have ``on_lost`` called once, from any thread, if a shard is lost."""
        with self._changed:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        """End the shards, wait until they have, and clear up. May be called twice."""
        with self._changed:
            self._closing = True
        for process in self._processes:
            process.dismiss()
        end = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.collect(end - time.monotonic())
        if self._monitor.is_alive() and threading.current_thread() is not self._monitor:
            self._monitor.join()
        for process in self._processes:
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ computing together

    def send(self, command: messages.Command) -> None:
        """Give all of them a command.

        A step of 1 / 32 / 256 rows takes 1 / 1 / 4 us to encode, and each shard 50 to 70 us on a
        busy server core, nearly all of it the system's, which wakes the shard.
        """
        data = messages.encode(command)
        for process in self._processes:
            process.commands.send(data)

    def prepare_adapter(
        self, adapter_id: int, name: str, path: str, own: Future[None]
    ) -> Future[None]:
        """Let all shards read an adapter; done when they and ``own`` are."""
        preparation = _Preparation(len(self._processes) + 1)
        with self._changed:
            self._preparing[adapter_id] = preparation
        with self.together():
            self.send(messages.PrepareAdapter(adapter_id, name, path))
        own.add_done_callback(lambda done: preparation.answer(done.exception()))
        preparation.future.add_done_callback(lambda _: self._preparing.pop(adapter_id, None))
        return preparation.future

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around what all shards do together before they serve.

        Raises:
            TgiError: why it failed; on this shard, or on the one that was to blame.
        """
        try:
            yield
        except TgiError:
            raise  # this shard's own; close() ends the others
        except Exception as error:  # whatever it is, the others may not be where this one is
            raise self._verdict(error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around a step, or a part of one: whatever fails in it is fatal.

        Raises:
            ShardError: which shard failed, and how.
        """
        self._step_ticks = 0
        try:
            yield
            self.check()  # what was aborted on a CUDA device ends as if it had been done
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
        """Why an operation failed. A connection breaks a little before the reason is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, _VERDICT_SECONDS)
        words = str(error).partition("\n")[0]
        if "timed out" in words.lower():
            seconds = OPERATION_SECONDS[self.shard.device.type]
            cause = f"a shard did not take part in a step for {seconds:g} s"
            self._lose(ShardError(cause, "see the shards' logs above"))
        else:
            self._lose(ShardError(f"shard 0: {type(error).__name__}: {words}", _SEE_LOG))
        assert self._lost is not None
        return self._lost

    def _lose(self, error: TgiError) -> None:
        """End all shards because of ``error``, unless they end for another reason already."""
        with self._changed:
            if self._lost is not None:
                return
            if self._serving and not isinstance(error, ShardError):
                error = ShardError(error.cause, error.remedy)
            self._lost = error
            self._changed.notify_all()
            on_lost, preparing = self._on_lost, list(self._preparing.values())
        for process in self._processes:
            process.kill()  # who waits for them in an operation of gloo's waits no longer
        self.shard.abort()
        for preparation in preparing:
            preparation.answer(error)
        if on_lost is not None and not self._closing:
            on_lost(error)

    # ------------------------------------------------------------------ the monitor's thread

    def _watch_over(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.events, selectors.EVENT_READ, process)
            due = time.monotonic()
            while self._lost is None and not self._closing:
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    try:
                        self._take(key.data)
                    except (OSError, ValueError) as error:  # half a message, or none of ours
                        cause = f"shard {key.data.rank} cannot be understood: {error}"
                        self._lose(ShardError(cause, _SEE_LOG))
                if time.monotonic() >= due:
                    due = time.monotonic() + PING_SECONDS
                    self._tick()

    def _take(self, process: ShardProcess) -> None:
        """News of a shard; none is the event of its end."""
        message = process.events.receive()
        if self._closing:
            return
        if message is None:
            self._lose(process.ended())
            return
        event = messages.decode_event(message)
        if isinstance(event, messages.Failed):
            kind = getattr(errors, event.kind, ShardError)
            self._lose(kind(f"shard {process.rank}: {event.cause}", event.remedy or _SEE_LOG))
        elif isinstance(event, messages.AdapterPrepared):
            error = TgiError(event.cause, event.remedy) if event.cause else None
            with self._changed:
                preparation = self._preparing.get(event.adapter_id)
            if preparation is not None:  # else another shard has refused it already
                preparation.answer(error)
        elif isinstance(event, messages.Loaded):
            with self._changed:
                process.loaded = True
                self._changed.notify_all()
        else:
            process.unanswered = 0

    def _tick(self) -> None:
        """Ping all; see who has not answered for too long."""
        limit = UNANSWERED if self._serving else UNANSWERED_AT_START
        for process in self._processes:
            if process.unanswered >= limit:
                cause = f"shard {process.rank} has not answered for {limit * PING_SECONDS:g} s"
                self._lose(ShardError(cause, "it was stopped, or it hangs"))
                return
            process.unanswered += 1
            process.ping()
        ticks = self._step_ticks
        if ticks is not None and self._serving and self.shard.device.type == "cuda":
            self._step_ticks = ticks + 1
            if ticks * PING_SECONDS >= CUDA_STEP_SECONDS:
                cause = f"a step has not ended within {CUDA_STEP_SECONDS} s"
                self._lose(ShardError(cause, "see the shards' logs above"))


def _log_level() -> str:
    """The name of this process's."""
    level = log.getEffectiveLevel()
    return next((name for name in LEVELS if getattr(logging, name, 0) >= level), LEVELS[-1])


class _Preparation:
    """An adapter that all shards are to hold: a future of their answers."""

    def __init__(self, shards: int) -> None:
        self.future: Future[None] = Future()
        self._missing = shards
        self._lock = threading.Lock()

    def answer(self, error: BaseException | None) -> None:
        """One more shard holds it; or one cannot, which is everybody's answer."""
        with self._lock:
            self._missing -= 1
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            elif not self._missing:
                self.future.set_result(None)
