"""Runs one step of a benchmark in processes of its own, and tells what happens as it happens.

    driver = Driver(target, settings, tokenizer)
    async with contextlib.aclosing(driver.drive(step, requests, index, total)) as events:
        async for event in events: ...

The events of a step, in order: StepStarted; then Progress (four times a second), RequestDone,
BatchDone and StepFailed as they come; StepEnded with the whole record. Always the last: also when
the step was stopped, or its load generator died (StepFailed with ``fatal``, then StepEnded with
what there was).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Iterable
from itertools import chain, islice

from tgi_cli.bench.events import (
    BatchDone,
    BatchRecord,
    BenchRequest,
    BenchRequestRecord,
    BenchStep,
    BenchTarget,
    ClientHealth,
    Event,
    RequestDone,
    StepEnded,
    StepFailed,
    StepProgress,
    StepRecord,
    StepStarted,
)
from tgi_cli.bench.generators import GeneratorLost, GeneratorProcess, RequestFeeder
from tgi_cli.bench.load.client_lag import worst_of
from tgi_cli.bench.load.frames import (
    BeginStep,
    FromGenerator,
    GeneratorEnded,
    GeneratorJob,
    GeneratorReady,
    RequestFinished,
    RunNote,
)
from tgi_cli.bench.load.http import request_head, tls_context
from tgi_cli.bench.metrics_scrape import MetricsScraper
from tgi_cli.bench.settings import RequestSettings, Route, TokenCounter, route_of
from tgi_cli.bench.token_counter import TokenRecount
from tgi_cli.errors import ConfigError

_STREAMS_PER_PROCESS = 256
_START_SECONDS = 0.02
"""From the word that all are ready to second 0."""
_STOP_SECONDS = 5.0
_EARLY = frozenset({"stop", "eos_token", "stop_sequence"})


class LoadDriver:
    """Puts load on one target, a step at a time.

    Args:
        target: a URL (``tgi``, ``openai``) or a socket (``shard-v3``).
        settings: of all requests.
        tokenizer: counts answers whose server does not say, and checks what others say; None:
            events are counted, and nothing is checked.

    Attributes:
        notes: what a reader of the figures must know, one sentence each, without repeats; for
            ``Run.notes``.
        server: the target's own figures of now, by TGI's names, read once a second while a step
            runs; empty where it has none.
    """

    def __init__(
        self, target: BenchTarget, settings: RequestSettings, tokenizer: TokenCounter | None = None
    ) -> None:
        self.notes: list[str] = []
        self.server: dict[str, float] = {}
        self._target = target
        self._settings = settings
        self._recount = TokenRecount(tokenizer)
        self._running: _StepRun | None = None
        if target.kind == "engine":
            raise ConfigError(
                "a model server is driven by generate.v3 here, not by its own sessions",
                "name its socket as a shard (shard-v3)",
            )

    async def drive(
        self, step: BenchStep, requests: Iterable[BenchRequest], index: int = 0, total: int = 0
    ) -> AsyncGenerator[Event, None]:
        """Run ``step`` with the requests in their order.

        ``requests`` may be endless and slow: it is read in a thread, a little ahead of need. Of a
        step of the kind ``batch`` each run takes ``step.value`` of them; ``step.requests`` counts
        runs there, and the warm-ups are the first ones, within that count.

        Closing the generator (or cancelling the task) ends the load generator at once.

        Raises:
            ConfigError: the settings, the step and the target do not go together.
        """
        _check(step, self._target, self._settings)
        yield StepStarted(index, total, step)
        run = _StepRun(self, step, requests, index)
        self._running = run
        try:
            async with contextlib.aclosing(run.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._running = None

    def stop(self, reason: str = "stopped") -> None:
        """End the running step now; its record has what was done, and ``stopped`` says why.

        Requests in flight are dropped and not recorded. Nothing happens where no step runs.
        """
        if self._running is not None:
            self._running.stop(reason)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


class _StepRun:
    """One step: its processes, and what they told."""

    def __init__(
        self, driver: LoadDriver, step: BenchStep, requests: Iterable[BenchRequest], index: int
    ) -> None:
        self._driver = driver
        self._target, self._settings = driver._target, driver._settings
        self._recount = driver._recount
        self._step, self._index = step, index
        self._requests = iter(requests)
        self._processes: list[GeneratorProcess] = []
        self._told: asyncio.Queue[tuple[int, FromGenerator | GeneratorLost]] = asyncio.Queue()
        self._progress: dict[int, StepProgress] = {}
        self._records: list[BenchRequestRecord] = []
        self._batches: list[BatchRecord] = []
        self._clients: list[ClientHealth] = []
        self._ended: set[int] = set()
        self._stopped = ""
        self._began = time.time()

    def stop(self, reason: str) -> None:
        """See :meth:`LoadDriver.stop`."""
        self._stopped = self._stopped or reason
        for process in self._processes:
            process.terminate(_STOP_SECONDS)

    async def events(self) -> AsyncGenerator[Event, None]:
        """All but the first."""
        self._recount.begin()
        first = await asyncio.to_thread(lambda: list(islice(self._requests, 1)))
        route: Route = "completions"
        if self._target.kind != "shard-v3":
            route = route_of(self._target, self._settings, bool(first and first[0].messages))
        url = "" if self._target.kind == "shard-v3" else self._target.address
        scraper = MetricsScraper(url, self._settings, self._driver.server)
        feeder: asyncio.Task[None] | None = None
        try:
            await self._start(route)
            made = chain(first, self._requests)
            feed = RequestFeeder(self._processes, self._step, made, self._recount.expect)
            async for event in self._until_ready():
                yield event
            if not self._over:
                await feed.ahead()
                await scraper.start()
                self._began = time.time()
                origin = time.perf_counter() + _START_SECONDS
                for process in self._processes:
                    process.send(BeginStep(origin))
                feeder = asyncio.create_task(feed.rest())
            while not self._over:
                number, message = await self._told.get()
                async for event in self._taken(number, message):
                    yield event
            if feeder is not None and feeder.done() and not feeder.cancelled():
                feeder.result()  # what making requests raised
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
            await asyncio.gather(*(process.close() for process in self._processes))
            await scraper.stop()
        for text in [*self._recount.notes(), *self._early()]:
            self._driver.note(text)
        yield StepEnded(self._index, self._record(scraper.figures()))

    @property
    def _over(self) -> bool:
        return len(self._ended) == len(self._processes)

    async def _start(self, route: Route) -> None:
        """The processes, each with its share of the step."""
        shares = _shares(self._step, self._target, self._settings)
        for number, clients in enumerate(shares):
            process = GeneratorProcess(number, self._told)
            self._processes.append(process)
            job = GeneratorJob(
                self._target,
                self._step,
                self._settings,
                route,
                self._index,
                clients,
                self._step.requests or 0,
            )
            await process.start(job)

    async def _until_ready(self) -> AsyncGenerator[Event, None]:
        """Until every process waits for its second 0, or the first fails to."""
        waiting = set(range(len(self._processes)))
        while waiting and not self._over:
            number, message = await self._told.get()
            waiting.discard(number)
            if not isinstance(message, GeneratorReady):
                async for event in self._taken(number, message):
                    yield event

    async def _taken(
        self, number: int, message: FromGenerator | GeneratorLost
    ) -> AsyncGenerator[Event, None]:
        """What a message of a process means."""
        match message:
            case RequestFinished(record, text):
                record = await self._recount.count(record, text)
                self._records.append(record)
                yield RequestDone(self._index, record)
            case BatchDone(_, batch):
                self._batches.append(batch)
                yield message
            case StepFailed():
                yield message
            case StepProgress():
                self._progress[number] = message
                if number == min(set(range(len(self._processes))) - self._ended):
                    yield self._whole_progress()
            case RunNote(text):
                self._driver.note(text)
            case GeneratorEnded(client, stopped):
                self._ended.add(number)
                self._clients.append(client)
                self._stopped = self._stopped or stopped
            case GeneratorLost(cause, remedy):
                self._ended.add(number)
                if not self._stopped:
                    yield StepFailed(self._index, cause, remedy, True)
                    self.stop(cause)

    def _early(self) -> list[str]:
        """A note on answers that ended by themselves although they were not to."""
        whole = [record for record in self._records if record.error is None]
        early = [record for record in whole if record.finish_reason in _EARLY]
        if not self._settings.ignore_eos or not early:
            return []
        return [
            "The server does not keep to ignore_eos: answers ended before the last token asked for."
        ]

    def _whole_progress(self) -> StepProgress:
        """The progress of all processes together."""
        parts = self._progress.values()
        return StepProgress(
            index=self._index,
            done=sum(part.done for part in parts),
            expected=self._step.requests or 0,
            elapsed=max(part.elapsed for part in parts),
            in_flight=sum(part.in_flight for part in parts),
            errors=sum(part.errors for part in parts),
            tokens_per_second=sum(part.tokens_per_second for part in parts),
            queued=int(self._driver.server.get("tgi_queue_size", 0)),
        )

    def _record(self, server: dict[str, float]) -> StepRecord:
        records = sorted(self._records, key=lambda record: record.index)
        return StepRecord(
            step=self._step,
            began=self._began,
            duration=_duration(records, self._batches),
            requests=records,
            batches=self._batches,
            client=worst_of(self._clients),
            server=server,
            stopped=self._stopped,
        )


def _duration(records: list[BenchRequestRecord], batches: list[BatchRecord]) -> float:
    """From the first request that counts to the end of the last; of a shard, the time in calls."""
    counted = [record for record in records if not record.warmup]
    if counted:
        whole = [record for record in counted if record.error != "unfinished"] or counted
        return max(r.finished for r in whole) - min(r.scheduled for r in counted)
    return sum(batch.prefill + sum(batch.decodes) for batch in batches if not batch.warmup)


def _shares(step: BenchStep, target: BenchTarget, settings: RequestSettings) -> list[int]:
    """How many clients each process has; of other kinds of load than those, 0."""
    if step.kind == "batch" or target.kind == "shard-v3":
        return [0]
    streams = int(step.value)
    cores = os.cpu_count() or 1
    wanted = min(-(-streams // _STREAMS_PER_PROCESS), max(1, cores // 2))
    number = max(1, settings.processes or wanted)
    if step.kind == "rate":
        return [0] * number
    number = min(number, streams)
    return [streams // number + (place < streams % number) for place in range(number)]


def _check(step: BenchStep, target: BenchTarget, settings: RequestSettings) -> None:
    """Raises ConfigError for what cannot be, before a process is started for it."""
    if target.kind != "shard-v3":
        request_head(target.address, "/", settings.headers)
        tls_context(settings.insecure, settings.ca_file)
    if target.kind == "shard-v3" and step.kind != "batch":
        raise ConfigError(
            f"a shard is driven in batches, not by {step.kind}", "name a server's URL for that"
        )
    if step.value <= 0 or (step.kind != "rate" and step.value != int(step.value)):
        raise ConfigError(
            f"{step.value:g} is no {step.kind} (whole numbers above 0, of rates any)",
            "give a number above 0",
        )
