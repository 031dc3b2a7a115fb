"""The requests in their order, and whose turn is next in conversations."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tgi_cli.bench.events import (
    BatchDone,
    BatchRecord,
    BenchRequestRecord,
    StepFailed,
    StepProgress,
)
from tgi_cli.bench.load.frames import (
    FromGenerator,
    GeneratorJob,
    IndexedRequest,
    RequestFinished,
    RunNote,
)
from tgi_cli.bench.load.sender import ConversationState, RequestSender


@dataclass
class ConversationTurns:
    """One conversation: what was said, and the turns that wait for their answer."""

    talk: ConversationState = field(default_factory=ConversationState)
    waiting: deque[IndexedRequest] = field(default_factory=deque)
    running: bool = False


class RequestSource:
    """Takes requests in as they are made elsewhere, and gives them out.

    A request of a conversation that runs is handed over to whoever runs it.
    """

    def __init__(self, ahead: int = 512) -> None:
        self._queue: asyncio.Queue[IndexedRequest | None] = asyncio.Queue(ahead)
        self._lock = asyncio.Lock()
        self._next: IndexedRequest | None = None
        self._over = False
        self._conversations: dict[int, ConversationTurns] = {}

    async def put(self, item: IndexedRequest | None) -> None:
        """One more; None: that were all. Waits while many are ahead of need."""
        await self._queue.put(item)

    async def take(self) -> tuple[IndexedRequest, ConversationTurns | None] | None:
        """The next request to begin, with its conversation; None: there is no more."""
        async with self._lock:
            await self._fill()
            item, self._next = self._next, None
            if item is None:
                return None
            number = item.request.conversation
            if number is None:
                return item, None
            turns = self._conversations.setdefault(number, ConversationTurns())
            turns.running = True
            return item, turns

    async def turn(self, turns: ConversationTurns) -> IndexedRequest | None:
        """The next turn of a conversation that runs; None: it has ended, for now."""
        if not turns.waiting and not turns.talk.failed:
            async with self._lock:
                await self._fill(turns)
        if turns.waiting and not turns.talk.failed:
            return turns.waiting.popleft()
        turns.running = False
        return None

    async def _fill(self, wanted: ConversationTurns | None = None) -> None:
        """Hand turns over, until one came for ``wanted`` or the next request begins something."""
        while self._next is None and not self._over and not (wanted and wanted.waiting):
            item = await self._queue.get()
            if item is None:
                self._over = True
                return
            number = item.request.conversation
            turns = None if number is None else self._conversations.get(number)
            if turns is None or not (turns.running or turns.talk.failed):
                self._next = item
            elif turns.running and not turns.talk.failed:
                turns.waiting.append(item)
            # A turn behind one that failed has nothing to answer; it is left out.


_LOOK = 0.05
"""Seconds between two looks at whether the step is over."""
_PROGRESS = 0.25
_WINDOW = 8
"""Progresses over which the rate of tokens is taken: two seconds."""
_UNREACHABLE_SECONDS = 3.0
_UNREACHABLE_TIMES = 5
_REFUSED_TIMES = 20
"""Answers of a 4xx status, and no other, after which no more are asked for."""
_HOPELESS = {"http 401", "http 403", "http 404"}
"""Errors that every further step would have as well."""


class LoadGenerator:
    """Runs one job.

    Args:
        job: what to do.
        report: takes frames for whoever started this process.

    Attributes:
        source: is to be filled with the job's requests.
        stopped: why the step ended before its time; empty: it did not.
    """

    def __init__(self, job: GeneratorJob, report: Callable[[FromGenerator], None]) -> None:
        self._job = job
        self._step = job.step
        self._report = report
        self._sender = RequestSender(job, lambda text: report(RunNote(text)))
        self._end = math.inf
        self._done_runs = 0
        self._rates: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._shown = -math.inf
        self.source = RequestSource()
        self.stopped = ""
        self._halt = asyncio.Event()

    @property
    def late(self) -> list[float]:
        """Seconds behind their time at which requests were begun."""
        return self._sender.tally.late

    def stop(self) -> None:
        """End now; what is in flight is dropped."""
        self._halt.set()

    async def run(self, origin: float) -> None:
        """Until the step is over; ``origin`` is its second 0 on time.perf_counter()."""
        if self._halt.is_set():
            return
        self._sender.origin = origin
        await self._until(0.0)
        if self._step.warmup == 0 and self._step.seconds is not None:
            self._end = self._step.seconds
        work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "batch": self._batches,
            "concurrency": self._clients,
            "rate": self._arrivals,
        }
        main = asyncio.ensure_future(work[self._step.kind]())
        try:
            while not main.done():
                await asyncio.wait({main}, timeout=_LOOK)
                self._progress()
                if self._over_now():
                    break
        finally:
            await _cancelled(main)
            self._sender.close()
        self._progress(last=True)

    def _over_now(self) -> bool:
        """Whether what still runs is to be cut off."""
        sender, now = self._sender, self._sender.now()
        if self._halt.is_set():
            return True
        if self._given_up():
            return True
        if now < self._end:
            return False
        if sender.tally.in_flight and now < self._end + self._job.settings.drain:
            return False
        sender.expired = True
        return True

    def _given_up(self) -> bool:
        """Whether there is no use in going on; says so then."""
        tally, address = self._sender.tally, self._job.target.address
        since = self._sender.now() - tally.refused_since
        if tally.refused_connections >= _UNREACHABLE_TIMES and since >= _UNREACHABLE_SECONDS:
            cause = f"{address} has taken no connection for {since:.0f} s"
            self._fail(cause, "see whether the server still runs", fatal=True)
            return True
        kinds = set(tally.kinds)
        refused = kinds and all(k.startswith("http 4") and k != "http 429" for k in kinds)
        if not tally.good and tally.errors >= _REFUSED_TIMES and refused:
            said = ", ".join(sorted(kinds))
            remedy = "the first record's detail has the server's reason"
            self._fail(f"{address} refuses every request: {said}", remedy, bool(kinds & _HOPELESS))
            return True
        return False

    def _fail(self, cause: str, remedy: str = "", fatal: bool = False) -> None:
        self.stopped = cause
        self._report(StepFailed(self._job.index, cause, remedy, fatal))

    async def _until(self, moment: float) -> None:
        """Wait for a second of the step; timers of whole milliseconds may be early."""
        while (seconds := moment - self._sender.now()) > 0:  # noqa: ASYNC110 - nobody would set it
            await asyncio.sleep(seconds)

    # -------------------------------------------------------------- kinds of load

    async def _clients(self) -> None:
        """Each sends its next request when it has its answer."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._job.clients):
                group.create_task(self._client())

    async def _client(self) -> None:
        while self._sender.now() < self._end and (taken := await self.source.take()):
            await self._talk(*taken)
            if refused := self._sender.tally.refused_connections:
                await asyncio.sleep(min(1.0, 0.05 * refused))

    async def _arrivals(self) -> None:
        """Each is sent when it is due, whatever the others do."""
        async with asyncio.TaskGroup() as group:
            while taken := await self.source.take():
                due = taken[0].request.at
                if due is not None:
                    if due >= self._end:
                        break
                    await self._until(due)
                elif self._sender.now() >= self._end:
                    break
                group.create_task(self._talk(*taken, due))

    async def _talk(
        self, item: IndexedRequest, turns: ConversationTurns | None, due: float | None = None
    ) -> None:
        """One request, or a conversation to its end."""
        if turns is None:
            await self._send(item, None, due, item.index < self._step.warmup)
            return
        following: IndexedRequest | None = item
        while following is not None:
            if turns.talk.ended:
                resume = turns.talk.ended + following.request.think
                if resume >= self._end:
                    break
                await self._until(resume)
            warmup = following.index < self._step.warmup
            await self._send(following, turns, due, warmup)
            if self._sender.expired:
                return
            due = None
            following = await self.source.turn(turns)

    async def _send(
        self, item: IndexedRequest, turns: ConversationTurns | None, due: float | None, warmup: bool
    ) -> BenchRequestRecord:
        if not warmup and self._end == math.inf and self._step.seconds is not None:
            self._end = (self._sender.now() if due is None else due) + self._step.seconds
        talk = None if turns is None else turns.talk
        finished: RequestFinished = await self._sender.send(item, due, talk, warmup)
        self._report(finished)
        return finished.record

    async def _batches(self) -> None:
        """So many at once, then again."""
        size = int(self._step.value)
        while self._sender.now() < self._end:
            taken = [taken for _ in range(size) if (taken := await self.source.take())]
            if len(taken) < size:
                return
            warmup = self._done_runs < self._step.warmup
            records = await asyncio.gather(
                *(self._send(item, None, None, warmup) for item, _ in taken)
            )
            self._done_runs += 1
            wrong = [record for record in records if record.error]
            if wrong:
                cause = f"{len(wrong)} of {size} requests failed: {wrong[0].error}"
                detail = wrong[0].detail
                self._report(StepFailed(self._job.index, f"{cause}: {detail}" if detail else cause))
                await asyncio.sleep(min(1.0, 0.05 * self._sender.tally.refused_connections))
            elif all(record.arrivals for record in records):
                self._report(BatchDone(self._job.index, batch_record(records, warmup)))

    # -------------------------------------------------------------- progress

    def _progress(self, last: bool = False) -> None:
        now, tally = self._sender.now(), self._sender.tally
        if now - self._shown < _PROGRESS and not last:
            return
        self._shown = now
        tokens = self._sender.tokens
        self._rates.append((now, tokens))
        began, before = self._rates[0]
        self._report(
            StepProgress(
                index=self._job.index,
                done=self._done_runs if self._step.kind == "batch" else tally.done,
                expected=self._job.expected,
                elapsed=now,
                in_flight=tally.in_flight,
                errors=tally.errors,
                tokens_per_second=(tokens - before) / (now - began) if now > began else 0.0,
            )
        )


def batch_record(records: list[BenchRequestRecord], warmup: bool) -> BatchRecord:
    """What TGI's benchmark would have seen of requests that were sent together.

    The prefill lasts until the last of them has its first token; a decode is the mean time to the
    next token.
    """
    firsts = [record.arrivals[0] for record in records]
    steps = [_steps(record) for record in records]
    gaps = []
    for number in range(max(map(len, steps))):
        running = [step[number] for step in steps if number < len(step)]
        gaps.append(sum(running) / len(running))
    return BatchRecord(
        batch_size=len(records),
        sequence_length=max(record.input_tokens for record in records),
        decode_length=max(record.output_tokens for record in records),
        prefill=max(firsts) - min(record.dispatched for record in records),
        decodes=gaps,
        warmup=warmup,
    )


def _steps(record: BenchRequestRecord) -> list[float]:
    """Seconds to each token behind the first: all the same where the stream does not show each."""
    times, tokens = record.arrivals, record.output_tokens
    if len(times) == tokens or tokens < 2:
        return [after - before for before, after in pairwise(times)]
    return [(record.finished - times[0]) / (tokens - 1)] * (tokens - 1)


async def _cancelled(task: asyncio.Future[None]) -> None:
    """End a task; what it had to say is raised, unless it was cancelled."""
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
