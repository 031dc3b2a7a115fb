"""Work of unknown cost, in processes that may be killed.

A grammar or a checkpoint's chat template of a few hundred bytes can take hours or all memory, which
its text does not show. They are handled in child processes of bounded time and memory:
:mod:`tgi_cli.process.pool_worker`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from tgi_cli.errors import RouterError
from tgi_cli.process.framing import Message, size_of
from tgi_cli.process.pool_child import PoolChild
from tgi_cli.process.pool_worker import OUT_OF_MEMORY

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_PATIENCE_SECONDS = 0.05
"""Wait for a busy process before another one is started, which takes longer."""
_EXIT_SECONDS = 2.0
_LARGE_BYTES = 64 << 10
"""Size from which a job goes through a thread: a pipe takes no more at once, and parsing more JSON
blocks the event loop."""
_CRASHES = frozenset(
    (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
)
"""Signals that end a process whose memory or stack cannot grow."""


class LimitError(Exception):
    """A job exceeded a limit, which the message names: "more than 5 s"."""


class WorkersBusy(Exception):
    """Too many jobs are waiting."""


class WorkerError(RouterError):
    """No process could be started, or processes were killed from outside."""


class _Killed(Exception):
    """A process was killed from outside during a job."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on jobs.

    Attributes:
        processes: Processes that work concurrently; started when they are needed.
        seconds, megabytes: For one job.
        bytes_per_byte: Memory for each byte of a job's body, if that is more.
        wait_seconds: Time that a job may wait for a process.
        reserved: Processes of several that large jobs leave to small ones.
    """

    processes: int = 2
    seconds: float = 5.0
    megabytes: int = 512
    bytes_per_byte: int = 0
    wait_seconds: float = 10.0
    reserved: int = 1


class WorkerPool:
    """Processes that do one kind of work; each does one job at a time.

    Args:
        module: The child's main module, which calls :func:`tgi_cli.process.pool_worker.serve`.
        setup: Sent to each process as JSON.
        limits: On each job, and on all.
        what: Kind of the processes for messages: "grammar compiler".
        remedy: For the error when none can be started.
        environment: Variables of the processes, besides this process's.
    """

    def __init__(
        self,
        module: str,
        setup: Any,
        limits: Limits,
        *,
        what: str,
        remedy: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._limits = limits
        self._what = what
        self._remedy = remedy
        self._environment = {"MALLOC_ARENA_MAX": "1", **(environment or {})}
        self._hello = json.dumps({"setup": setup, **asdict(limits)}).encode()
        name = module.rpartition(".")[2]
        self._threads = ThreadPoolExecutor(limits.processes, thread_name_prefix=name)
        # Of their own, so that large jobs that wait for a process take no thread of small ones.
        self._large_threads = ThreadPoolExecutor(limits.processes, thread_name_prefix=name)
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._idle: list[PoolChild] = []
        self._all: set[PoolChild] = set()
        self._starting = 0
        self._waiting = 0
        """Jobs in threads, or queued for one, that have no process yet."""
        self._large = 0
        """Large jobs in progress, which leave some processes to other jobs."""
        self._closed = False
        self._end = weakref.finalize(self, _kill_all, self._all)

    def run(self, body: Message) -> dict[str, Any]:
        """Return the answer to one job. Blocks; from any thread.

        Bytes of buffers that follow the answer are its item ``data``.

        Raises:
            LimitError: The job exceeds its time or memory.
            WorkersBusy: No process was free in time.
            WorkerError: No process can be started, or two were killed from outside.
        """
        with self._changed:
            self._waiting += 1
        return self._run(body, time.monotonic() + self._limits.wait_seconds, 2)

    async def run_async(self, body: Message) -> dict[str, Any]:
        """As :meth:`run`, without blocking the event loop.

        A small job takes no thread if a process is idle: each switch between threads may take the
        interpreter lock from the thread that delivers tokens, or wait for it.
        """
        loop = asyncio.get_running_loop()
        child = None if size_of(body) > _LARGE_BYTES else self._idle_child()
        tries = 2
        if child is not None:
            try:
                answer = await child.exchange_async(body, self._limits.seconds)
            except (TimeoutError, OSError, EOFError) as error:
                cause = await asyncio.to_thread(self._failed, child, error)
                if not isinstance(cause, _Killed):
                    raise cause from None
                tries = 1
            except BaseException:  # cancelled: the answer is no longer needed
                loop.run_in_executor(None, self._end_of, child)
                raise
            else:
                return self._take_in(child, answer)
        latest = time.monotonic() + self._limits.wait_seconds
        with self._changed:
            if self._closed:
                raise self._ended()
            self._waiting += 1
            large = size_of(body) > _LARGE_BYTES
            threads = self._large_threads if large else self._threads
            job = threads.submit(self._run, body, latest, tries)
        job.add_done_callback(self._given_up)
        return await asyncio.wrap_future(job)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that have been started."""
        return [child.pid for child in list(self._all)]

    @property
    def num_idle(self) -> int:
        """Number of processes that wait for a job."""
        return len(self._idle)

    def close(self) -> None:
        """Kill the processes; their jobs fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for threads in (self._threads, self._large_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _given_up(self, job: Future[dict[str, Any]]) -> None:
        """Handle the end of a job in a thread, which may have been cancelled before it got one."""
        if job.cancelled():
            with self._changed:
                self._waiting -= 1

    def _ended(self) -> WorkerError:
        return WorkerError(f"the {self._what} processes are being ended", "")

    def _run(self, body: Message, latest: float, tries: int) -> dict[str, Any]:
        large = size_of(body) > _LARGE_BYTES
        while True:
            tries -= 1
            child = self._child(latest, large)
            try:
                return self._take_in(child, child.exchange(body, self._limits.seconds))
            except (TimeoutError, OSError, EOFError) as error:
                cause = self._failed(child, error)
                if not isinstance(cause, _Killed):
                    raise cause from None
                if not tries:
                    raise WorkerError(
                        f"{self._what} processes are being killed: {cause}",
                        "find out what kills them, such as the system's out-of-memory killer",
                    ) from None
                with self._changed:
                    self._waiting += 1
            finally:
                if large:
                    with self._changed:
                        self._large -= 1
                        self._changed.notify_all()

    def _take_in(self, child: PoolChild, answer: dict[str, Any]) -> dict[str, Any]:
        """Return a process's answer, and the process to the pool. Raises LimitError."""
        if answer["last"]:
            self._forget(child)
            # It may take a moment to give its memory back.
            threading.Thread(target=child.end, args=(_EXIT_SECONDS,), daemon=True).start()
        else:
            with self._changed:
                self._idle.append(child)
                self._changed.notify_all()
        if "exhausted" in answer:
            raise LimitError(self._memory)
        if "defect" in answer:
            logger.error("a %s process: %s", self._what, answer["defect"])
            return {"error": "the server failed to process it: see its log"}
        found: dict[str, Any] = answer["answer"]
        if "data" in answer:
            found["data"] = answer["data"]
        return found

    @property
    def _memory(self) -> str:
        return f"more than {self._limits.megabytes} MB of memory"

    def _failed(self, child: PoolChild, error: Exception) -> Exception:
        """End a process that gave no answer; return the cause as an error."""
        slow = isinstance(error, TimeoutError)
        code = child.end(0.0 if slow else _EXIT_SECONDS)
        self._forget(child)
        if slow or code == -signal.SIGALRM:
            return LimitError(f"more than {self._limits.seconds:g} s")
        if self._closed:
            return self._ended()
        if code == OUT_OF_MEMORY or -code in _CRASHES:
            return LimitError(self._memory)
        return _Killed(f"by signal {-code}" if code < 0 else f"exit code {code}")

    def _idle_child(self) -> PoolChild | None:
        with self._changed:
            return None if self._waiting else self._pop()

    def _pop(self) -> PoolChild | None:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            self._all.discard(child)
        return None

    def _child(self, latest: float, large: bool) -> PoolChild:
        """Return a process for one job, which no longer counts as waiting then."""
        most = max(self._limits.processes - self._limits.reserved, 1)
        patient = time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            try:
                while True:
                    now = time.monotonic()
                    if self._closed:
                        raise self._ended()
                    if now >= latest:
                        raise WorkersBusy
                    until = latest
                    if not large or self._large < most:
                        child = self._pop()
                        if child is None and len(self._all) + self._starting < (
                            self._limits.processes
                        ):
                            if now >= patient or not self._all:
                                self._starting += 1
                                break
                            until = min(latest, patient)
                        if child is not None:
                            break
                    self._changed.wait(until - now)
                if large:
                    self._large += 1
            finally:
                self._waiting -= 1
        if child is not None:
            return child
        try:
            return self._start()
        except BaseException:
            if large:
                with self._changed:
                    self._large -= 1
            raise

    def _start(self) -> PoolChild:
        child = None
        try:
            child = PoolChild(self._module, self._environment)
            with self._changed:
                self._all.add(child)
            child.exchange(self._hello, _START_SECONDS)
            if self._closed:
                raise EOFError
        except (OSError, EOFError, TimeoutError) as error:
            if child is not None:
                self._end_of(child)
            if self._closed:
                raise self._ended() from None
            raise WorkerError(
                f"no {self._what} process can be started: {type(error).__name__} {error}",
                self._remedy or "see its log above",
            ) from error
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()
        return child

    def _end_of(self, child: PoolChild) -> None:
        child.end()
        self._forget(child)

    def _forget(self, child: PoolChild) -> None:
        with self._changed:
            self._all.discard(child)
            self._changed.notify_all()


def _kill_all(children: set[PoolChild]) -> None:
    for child in list(children):
        child.kill()
