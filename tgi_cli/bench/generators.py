"""Load generators, from the side of the parent process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from tgi_cli.bench.events import BenchRequest, BenchStep
from tgi_cli.bench.load import frames
from tgi_cli.process.framing import FrameDecoder
from tgi_cli.process.spawn import child_environment, module_command

_CHUNK = 32
"""Requests that are built and sent at a time."""
_MOST_AHEAD = 256
"""Most requests sent before second 0; a generator queues twice as many."""
_READ_BYTES = 1 << 18
_STDERR_LINES = 30
_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class GeneratorLost:
    """A process that ended without GeneratorEnded."""

    cause: str
    remedy: str


class GeneratorProcess:
    """One load generator.

    Args:
        number: Number of the process within its step.
        inbox: Receives its messages with its number; GeneratorLost if it ends early.
    """

    def __init__(
        self, number: int, inbox: asyncio.Queue[tuple[int, frames.FromGenerator | GeneratorLost]]
    ) -> None:
        self._number = number
        self._inbox = inbox
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._ended = False

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self, job: frames.ToGenerator) -> None:
        """Start the process with its job."""
        self._process = process = await asyncio.create_subprocess_exec(
            *module_command("tgi_cli.bench.load"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C on the terminal is for the parent process
        )
        tasks = (self._read_frames(process), self._read_stderr(process))
        self._tasks = [asyncio.create_task(task) for task in tasks]
        self.send(job)

    def send(self, message: frames.ToGenerator) -> None:
        """Send a frame; ignored if the process has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(frames.pack(message))

    async def drain(self) -> None:
        """Wait until most of what was sent is read."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # reported as GeneratorLost
                await self._process.stdin.drain()

    def terminate(self, seconds: float) -> None:
        """Ask the process to end, and kill it after so many seconds."""
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(seconds, self._signal, signal.SIGKILL)

    async def close(self) -> None:
        """End the process in any case."""
        if self._process is None:
            return
        if not self._ended:
            self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE_SECONDS)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read_frames(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        decoder = FrameDecoder()
        invalid = ""
        while data := await process.stdout.read(_READ_BYTES):
            try:
                messages = [frames.decode(frame) for frame in decoder.feed(data)]
            except msgspec.DecodeError as error:
                invalid = f"the load generator wrote an invalid message: {error}"
                self._signal(signal.SIGKILL)
                break
            for message in messages:
                self._ended = self._ended or isinstance(message, frames.GeneratorEnded)
                self._inbox.put_nowait((self._number, message))
        if not self._ended:
            status = await process.wait()
            await asyncio.wait(self._tasks[1:], timeout=1.0)
            self._inbox.put_nowait((self._number, self._lost(status, invalid)))

    def _lost(self, status: int, invalid: str) -> GeneratorLost:
        """The error that stderr has, or how the process ended."""
        lines = [line for line in self._stderr if line.strip()]
        for number, line in enumerate(lines):
            if line.startswith("error: "):
                remedy = "".join(lines[number + 1 : number + 2])
                return GeneratorLost(line.removeprefix("error: "), remedy)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        last = f": {lines[-1]}" if lines else ""
        return GeneratorLost(invalid or f"the load generator {how}{last}", "run the step again")

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # a line without end
            async for line in process.stderr:
                self._stderr.append(line.decode(errors="replace").rstrip("\n"))


class RequestFeeder:
    """Hands out requests to processes as they are built.

    Args:
        requests: The requests of the step in order; read in a thread, as building takes time.
        on_request: Called with each request and its number.
    """

    def __init__(
        self,
        processes: Sequence[GeneratorProcess],
        step: BenchStep,
        requests: Iterator[BenchRequest],
        on_request: Callable[[int, BenchRequest], None],
    ) -> None:
        self._on_request = on_request
        self._processes = processes
        self._requests = requests
        self._next = 0
        size = int(step.value) if step.kind == "batch" else 1
        self._ahead = min(_MOST_AHEAD, max(2 * _CHUNK, 2 * int(step.value)))
        self._total = None if step.requests is None else step.requests * size
        self._over = False

    async def feed_ahead(self) -> None:
        """Send as many requests as may be needed at once."""
        while self._next < self._ahead and not self._over:
            await self._feed_chunk()

    async def feed_rest(self) -> None:
        """Send all others, no faster than they are read."""
        while not self._over:
            await self._feed_chunk()

    async def _feed_chunk(self) -> None:
        count = _CHUNK if self._total is None else min(_CHUNK, self._total - self._next)
        chunk: list[BenchRequest] = []
        try:
            chunk = await asyncio.to_thread(lambda: list(islice(self._requests, count)))
        finally:
            self._over = len(chunk) < count or self._next + len(chunk) == self._total
            shares: list[list[frames.IndexedRequest]] = [[] for _ in self._processes]
            for request in chunk:
                self._on_request(self._next, request)
                turn = self._next if request.conversation is None else request.conversation
                shares[turn % len(shares)].append(frames.IndexedRequest(self._next, request))
                self._next += 1
            for process, items in zip(self._processes, shares, strict=True):
                if items:
                    process.send(frames.RequestChunk(items))
                if self._over:
                    process.send(frames.EndOfRequests())
        for process in self._processes:
            await process.drain()
