"""Load generators as their run sees them: processes that get requests and tell how they went."""

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
from tgi_cli.bench.load.frames import (
    EndOfRequests,
    FrameReader,
    FromGenerator,
    GeneratorEnded,
    IndexedRequest,
    RequestChunk,
    ToGenerator,
    pack,
)
from tgi_cli.process.spawn import child_environment, module_command

_CHUNK = 32
"""Requests that are made and sent at a time."""
_MOST_AHEAD = 256
"""Before second 0; a generator takes twice as many in before it begins."""
_READ = 1 << 18
_LINES = 30
_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class GeneratorLost:
    """A process that ended without having said so."""

    cause: str
    remedy: str


class GeneratorProcess:
    """One load generator.

    Args:
        number: among those of its step.
        told: gets (number, message) of whatever it says; Lost if it ends before its Ended.
    """

    def __init__(
        self, number: int, told: asyncio.Queue[tuple[int, FromGenerator | GeneratorLost]]
    ) -> None:
        self._number = number
        self._told = told
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._errors: deque[str] = deque(maxlen=_LINES)
        self._ended = False

    async def start(self, job: ToGenerator) -> None:
        """Start it with its job."""
        self._process = await asyncio.create_subprocess_exec(
            *module_command("tgi_cli.bench.load"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C on the terminal is the run's to handle
        )
        self._tasks = [
            asyncio.create_task(self._listen(self._process)),
            asyncio.create_task(self._keep_errors(self._process)),
        ]
        self.send(job)

    def send(self, message: ToGenerator) -> None:
        """Send a frame; into nothing if the process has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(pack(message))

    async def drain(self) -> None:
        """Wait until it has taken in what was sent, but for a little."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # its end is told elsewhere
                await self._process.stdin.drain()

    def terminate(self, seconds: float) -> None:
        """Ask it to end; it is killed if it has not after so many seconds."""
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(seconds, self._signal, signal.SIGKILL)

    async def close(self) -> None:
        """Make sure that it has ended."""
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

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        unpacker = FrameReader()
        broken = ""
        while data := await process.stdout.read(_READ):
            try:
                messages = unpacker.feed(data)
            except msgspec.DecodeError as error:
                broken = f"the load generator wrote what is no message: {error}"
                self._signal(signal.SIGKILL)
                break
            for message in messages:
                self._ended = self._ended or isinstance(message, GeneratorEnded)
                self._told.put_nowait((self._number, message))
        if self._ended:
            return
        status = await process.wait()
        await asyncio.wait(self._tasks[1:], timeout=1.0)
        self._told.put_nowait((self._number, self._lost(status, broken)))

    def _lost(self, status: int, broken: str) -> GeneratorLost:
        """What its last words say."""
        lines = [line for line in self._errors if line.strip()]
        for number, line in enumerate(lines):
            if line.startswith("error: "):
                return GeneratorLost(
                    line.removeprefix("error: "), "".join(lines[number + 1 : number + 2])
                )
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        last = f": {lines[-1]}" if lines else ""
        return GeneratorLost(broken or f"the load generator {how}{last}", "run the step again")

    async def _keep_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # a line without end
            async for line in process.stderr:
                self._errors.append(line.decode(errors="replace").rstrip("\n"))


class RequestFeeder:
    """Hands requests out to processes, as they are made.

    Args:
        requests: in the order of the step; read in a thread, because making them takes time.
        on_made: is told of each, with its number.
    """

    def __init__(
        self,
        processes: Sequence[GeneratorProcess],
        step: BenchStep,
        requests: Iterator[BenchRequest],
        on_made: Callable[[int, BenchRequest], None],
    ) -> None:
        self._on_made = on_made
        self._processes = processes
        self._requests = requests
        self._next = 0
        size = int(step.value) if step.kind == "batch" else 1
        self._ahead = min(_MOST_AHEAD, max(2 * _CHUNK, 2 * int(step.value)))
        self._left = None if step.requests is None else step.requests * size
        self._over = False

    async def ahead(self) -> None:
        """As many as may be needed at once."""
        while self._next < self._ahead and not self._over:
            await self._some()

    async def rest(self) -> None:
        """All others, no faster than they are taken."""
        while not self._over:
            await self._some()

    async def _some(self) -> None:
        count = _CHUNK if self._left is None else min(_CHUNK, self._left - self._next)
        made: list[BenchRequest] = []
        try:
            made = await asyncio.to_thread(lambda: list(islice(self._requests, count)))
        finally:
            self._over = len(made) < count or count == 0 or self._next + len(made) == self._left
            shares: list[list[IndexedRequest]] = [[] for _ in self._processes]
            for request in made:
                self._on_made(self._next, request)
                turn = self._next if request.conversation is None else request.conversation
                shares[turn % len(shares)].append(IndexedRequest(self._next, request))
                self._next += 1
            for process, items in zip(self._processes, shares, strict=True):
                if items:
                    process.send(RequestChunk(items))
                if self._over:
                    process.send(EndOfRequests())
        for process in self._processes:
            await process.drain()
