"""Puts a step's load on a server over HTTP: clients, requests at their times, closed batches."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from tgi_cli.bench.events import (
    BatchDone,
    BatchRecord,
    BenchRequestRecord,
    StepFailed,
    StepProgress,
)
from tgi_cli.bench.load.frames import FromGenerator, GeneratorJob, IndexedRequest, RunNote
from tgi_cli.bench.load.sender import ConversationState, RequestSender, SenderState

_CHECK_SECONDS = 0.05
"""Seconds between checks whether the step is over."""
PROGRESS_SECONDS = 0.25
"""Seconds between reports of progress."""
_WINDOW = 8
"""Reports of progress over which the token rate is taken: two seconds."""
_UNREACHABLE_SECONDS = 3.0
_UNREACHABLE_TIMES = 5
_REFUSED_TIMES = 20
"""Responses with a 4xx status, and no others, after which the step is given up."""
_FATAL = {"http 401", "http 403", "http 404"}
"""Errors that every further step would have as well."""


class RequestSource:
    """Hands out requests in their order.

    The next turn of a conversation that runs goes to the task that runs it.
    """

    def __init__(self, ahead: int = 512) -> None:
        self._queue: asyncio.Queue[IndexedRequest | None] = asyncio.Queue(ahead)
        self._lock = asyncio.Lock()
        self._next: IndexedRequest | None = None
        self._over = False
        self._conversations: dict[int, ConversationState] = {}

    async def put(self, item: IndexedRequest | None) -> None:
        """Add a request, or None after the last. Waits while many are queued."""
        await self._queue.put(item)

    async def take(self) -> tuple[IndexedRequest, ConversationState | None] | None:
        """Take the next request with its conversation, or None after the last."""
        async with self._lock:
            await self._fill()
            item, self._next = self._next, None
        if item is None:
            return None
        number = item.request.conversation
        if number is None:
            return item, None
        conversation = self._conversations.setdefault(number, ConversationState())
        conversation.running = True
        return item, conversation

    async def turn(self, conversation: ConversationState) -> IndexedRequest | None:
        """Take the next turn of a running conversation, or None if there is none yet."""
        if not conversation.waiting and not conversation.failed:
            async with self._lock:
                await self._fill(conversation)
        if conversation.waiting and not conversation.failed:
            return conversation.waiting.popleft()
        conversation.running = False
        return None

    async def _fill(self, wanted: ConversationState | None = None) -> None:
        """Hand turns over until ``wanted`` has one or the next request starts something."""
        while self._next is None and not self._over and not (wanted and wanted.waiting):
            item = await self._queue.get()
            if item is None:
                self._over = True
                return
            number = item.request.conversation
            conversation = None if number is None else self._conversations.get(number)
            if conversation is None or not (conversation.running or conversation.failed):
                self._next = item
            elif not conversation.failed:  # else there is no response to follow
                conversation.waiting.append(item)


class LoadGenerator:
    """Runs one job of batches; :class:`HttpLoadGenerator` runs every kind.

    Args:
        job: What to do.
        report: Sends frames to the parent process.
        sender: Counts what is sent.

    Attributes:
        source: Takes the requests of the job.
        stopped: Why the step ended early; empty if it did not.
    """

    def __init__(
        self, job: GeneratorJob, report: Callable[[FromGenerator], None], sender: SenderState
    ) -> None:
        self._job = job
        self._step = job.step
        self._report = report
        self._sender = sender
        self._end = math.inf
        self._runs_done = 0
        self._rates: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._reported = -math.inf
        self.source = RequestSource()
        self.stopped = ""
        self._halt = asyncio.Event()

    @property
    def late(self) -> list[float]:
        """Seconds by which each request was started late."""
        return self._sender.counters.late

    def stop(self) -> None:
        """End now, without the requests in flight."""
        self._halt.set()

    async def run(self, origin: float) -> None:
        """Run until the step is over; ``origin`` is its second 0 on time.perf_counter()."""
        if self._halt.is_set():
            return
        self._sender.origin = origin
        await self._sleep_until(0.0)
        if self._step.warmup == 0 and self._step.seconds is not None:
            self._end = self._step.seconds
        main = asyncio.ensure_future(self._load())
        try:
            while not main.done():
                await asyncio.wait({main}, timeout=_CHECK_SECONDS)
                self._progress()
                if self._is_over():
                    break
        finally:
            if not main.done():
                main.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await main
            self._sender.close()
        self._progress(last=True)

    def _is_over(self) -> bool:
        """Whether to cut off what still runs."""
        sender, now = self._sender, self._sender.now()
        if self._halt.is_set() or self._has_failed():
            return True
        if now < self._end:
            return False
        if sender.counters.in_flight and now < self._end + self._job.settings.drain:
            return False
        sender.expired = True
        return True

    def _has_failed(self) -> bool:
        """Whether to give up; ``stopped`` says why."""
        return False

    def _fail(self, cause: str, remedy: str = "", fatal: bool = False) -> None:
        self._report(StepFailed(self._job.index, cause, remedy, fatal))

    async def _sleep_until(self, moment: float) -> None:
        """Sleep until a second of the step; timers of whole milliseconds may be early."""
        while (seconds := moment - self._sender.now()) > 0:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(seconds)

    def _count_time_from(self, moment: float, warmup: bool) -> None:
        """Begin the step's time with the first request that counts."""
        if not warmup and self._end == math.inf and self._step.seconds is not None:
            self._end = moment + self._step.seconds

    async def _load(self) -> None:
        """Put the load of the step on the target."""
        await self._batches()

    async def _batches(self) -> None:
        """Run one batch after another."""
        size = int(self._step.value)
        while not self.stopped and self._sender.now() < self._end:
            taken = [taken for _ in range(size) if (taken := await self.source.take())]
            if len(taken) < size:
                return
            warmup = self._runs_done < self._step.warmup
            await self._run_batch([item for item, _ in taken], warmup)
            self._runs_done += 1

    async def _run_batch(self, items: Sequence[IndexedRequest], warmup: bool) -> None:
        """Run a batch and report it."""
        raise NotImplementedError

    def _progress(self, last: bool = False) -> None:
        now, counters, tokens = self._sender.now(), self._sender.counters, self._sender.tokens
        if now - self._reported < PROGRESS_SECONDS and not last:
            return
        self._reported = now
        self._rates.append((now, tokens))
        began, before = self._rates[0]
        self._report(
            StepProgress(
                index=self._job.index,
                done=self._runs_done if self._step.kind == "batch" else counters.done,
                expected=self._job.expected,
                elapsed=now,
                in_flight=counters.in_flight,
                errors=counters.errors,
                tokens_per_second=(tokens - before) / (now - began) if now > began else 0.0,
            )
        )


class HttpLoadGenerator(LoadGenerator):
    """Runs one job over HTTP."""

    def __init__(self, job: GeneratorJob, report: Callable[[FromGenerator], None]) -> None:
        self._requests = RequestSender(job, lambda text: report(RunNote(text)))
        super().__init__(job, report, self._requests)

    async def _load(self) -> None:
        kinds = {"batch": self._batches, "concurrency": self._clients, "rate": self._arrivals}
        await kinds[self._step.kind]()

    def _has_failed(self) -> bool:
        """Whether to give up, because the server is unreachable or refuses every request."""
        counters, address = self._sender.counters, self._job.target.address
        since = self._sender.now() - counters.refused_since
        if counters.refused_connections >= _UNREACHABLE_TIMES and since >= _UNREACHABLE_SECONDS:
            self.stopped = f"{address} has accepted no connection for {since:.0f} s"
            self._fail(self.stopped, "check whether the server still runs", fatal=True)
            return True
        kinds = set(counters.kinds)
        refused = all(kind.startswith("http 4") and kind != "http 429" for kind in kinds)
        if refused and counters.errors == counters.done >= _REFUSED_TIMES:
            self.stopped = f"{address} refuses every request: {', '.join(sorted(kinds))}"
            remedy = "the first record's detail has the server's reason"
            self._fail(self.stopped, remedy, fatal=bool(kinds & _FATAL))
            return True
        return False

    async def _clients(self) -> None:
        """Run clients that send the next request when they have their response."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._job.clients):
                group.create_task(self._client())

    async def _client(self) -> None:
        while self._sender.now() < self._end and (taken := await self.source.take()):
            await self._converse(*taken)
            await self._back_off()

    async def _back_off(self) -> None:
        if refused := self._sender.counters.refused_connections:
            await asyncio.sleep(min(1.0, 0.05 * refused))

    async def _arrivals(self) -> None:
        """Send each request when it is due."""
        async with asyncio.TaskGroup() as group:
            while taken := await self.source.take():
                due = taken[0].request.at
                if (self._sender.now() if due is None else due) >= self._end:
                    break
                if due is not None:
                    await self._sleep_until(due)
                group.create_task(self._converse(*taken, due))

    async def _converse(
        self,
        item: IndexedRequest,
        conversation: ConversationState | None,
        due: float | None = None,
    ) -> None:
        """Send one request, or a conversation to its end."""
        following: IndexedRequest | None = item
        while following is not None:
            if conversation is not None and conversation.ended:
                resume = conversation.ended + following.request.think
                if resume >= self._end:
                    break
                await self._sleep_until(resume)
            warmup = following.index < self._step.warmup
            await self._send(following, conversation, due, warmup)
            if conversation is None or self._sender.expired:
                return
            due = None
            following = await self.source.turn(conversation)

    async def _send(
        self,
        item: IndexedRequest,
        conversation: ConversationState | None,
        due: float | None,
        warmup: bool,
    ) -> BenchRequestRecord:
        self._count_time_from(self._sender.now() if due is None else due, warmup)
        finished = await self._requests.send(item, due, conversation, warmup)
        self._report(finished)
        return finished.record

    async def _run_batch(self, items: Sequence[IndexedRequest], warmup: bool) -> None:
        """Send requests at once, and wait for all responses."""
        records = await asyncio.gather(*(self._send(item, None, None, warmup) for item in items))
        failed = [record for record in records if record.error]
        if failed:
            cause = f"{len(failed)} of {len(items)} requests failed: {failed[0].error}"
            self._fail(f"{cause}: {failed[0].detail}".removesuffix(": "))
            await self._back_off()
        elif all(record.arrivals for record in records):
            self._report(BatchDone(self._job.index, batch_record(records, warmup)))


def batch_record(records: list[BenchRequestRecord], warmup: bool) -> BatchRecord:
    """The record that TGI's benchmark would make of requests sent together.

    The prefill lasts until the last request has its first token; a decode is the mean time to the
    next token.
    """
    first_tokens = [record.arrivals[0] for record in records]
    gaps = [_gaps(record) for record in records]
    decodes = []
    for number in range(max(map(len, gaps))):
        running = [each[number] for each in gaps if number < len(each)]
        decodes.append(sum(running) / len(running))
    return BatchRecord(
        batch_size=len(records),
        sequence_length=max(record.input_tokens for record in records),
        decode_length=max(record.output_tokens for record in records),
        prefill=max(first_tokens) - min(record.dispatched for record in records),
        decodes=decodes,
        warmup=warmup,
    )


def _gaps(record: BenchRequestRecord) -> list[float]:
    """Seconds before each token after the first; their mean if events merge tokens."""
    times, tokens = record.arrivals, record.output_tokens
    if len(times) == tokens or tokens < 2:
        return [after - before for before, after in pairwise(times)]
    return [(record.finished - times[0]) / (tokens - 1)] * (tokens - 1)
