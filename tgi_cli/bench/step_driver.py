"""Runs one step of a benchmark in load generator processes.

    driver = LoadDriver(target, settings, tokenizer)
    async with contextlib.aclosing(driver.drive(step, requests, index, total)) as stream:
        async for event in stream: ...

The events of a step are StepStarted; then StepProgress (four times a second), RequestDone,
BatchDone and StepFailed as they occur; and always StepEnded with the whole record, also if the step
was stopped or its load generator died (StepFailed with ``fatal``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Iterable
from itertools import chain, islice

from tgi_cli.bench import events
from tgi_cli.bench.generators import GeneratorLost, GeneratorProcess, RequestFeeder
from tgi_cli.bench.load import frames
from tgi_cli.bench.load.client_lag import worst_of
from tgi_cli.bench.load.http import request_head
from tgi_cli.bench.metrics_scrape import MetricsScraper
from tgi_cli.bench.settings import RequestSettings, Route, TokenCounter, route_of
from tgi_cli.bench.statistics.observations import measured_seconds
from tgi_cli.bench.token_counter import TokenRecount
from tgi_cli.errors import ConfigError

_STREAMS_PER_PROCESS = 256
_START_SECONDS = 0.02
"""Seconds from the last GeneratorReady to second 0."""
_STOP_SECONDS = 5.0
_EARLY_REASONS = frozenset({"stop", "eos_token", "stop_sequence"})
_EARLY = "The server ignores ignore_eos: responses ended before the last token requested."


class LoadDriver:
    """Puts load on one target, a step at a time.

    Args:
        target: A URL (``tgi``, ``openai``) or a socket (``shard-v3``).
        settings: The settings of all requests.
        tokenizer: Counts the tokens of responses without usage, and checks usage. None counts
            events, and checks nothing.

    Attributes:
        notes: Notes for the reader of the results (``BenchRun.notes``), without repeats.
    """

    def __init__(
        self,
        target: events.BenchTarget,
        settings: RequestSettings,
        tokenizer: TokenCounter | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.target = target
        self.settings = settings
        self.recount = TokenRecount(tokenizer)
        self._running: _StepRun | None = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the running load generators."""
        return [process.pid for process in self._running.processes] if self._running else []

    async def drive(
        self,
        step: events.BenchStep,
        requests: Iterable[events.BenchRequest],
        index: int = 0,
        total: int = 0,
    ) -> AsyncGenerator[events.Event, None]:
        """Run ``step`` with the requests in their order.

        ``requests`` may be endless and slow: a thread reads it, a little ahead of need. In a step
        of the kind ``batch`` each run takes ``step.value`` of them; ``step.requests`` counts runs
        then, with the warm-ups, which come first.

        Closing the generator (or cancelling the task) ends the load generators at once.

        Raises:
            ConfigError: The settings, the step and the target are incompatible.
        """
        _check(step, self.target, self.settings)
        yield events.StepStarted(index, total, step)
        self._running = _StepRun(self, step, requests, index)
        try:
            async with contextlib.aclosing(self._running.run()) as stream:
                async for event in stream:
                    yield event
        finally:
            self._running = None

    def stop(self, reason: str = "stopped") -> None:
        """End the running step, if any; ``stopped`` of its record gives the reason.

        Requests in flight are dropped and not recorded.
        """
        if self._running is not None:
            self._running.stop(reason)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


class _StepRun:
    """One step: its processes, and what they reported."""

    def __init__(
        self,
        driver: LoadDriver,
        step: events.BenchStep,
        requests: Iterable[events.BenchRequest],
        index: int,
    ) -> None:
        self._driver, self._target, self._settings = driver, driver.target, driver.settings
        self._step, self._index = step, index
        self._requests = iter(requests)
        self.processes: list[GeneratorProcess] = []
        self._inbox: asyncio.Queue[tuple[int, frames.FromGenerator | GeneratorLost]] = (
            asyncio.Queue()
        )
        self._progress: dict[int, events.StepProgress] = {}
        self._records: list[events.BenchRequestRecord] = []
        self._batches: list[events.BatchRecord] = []
        self._clients: list[events.ClientHealth] = []
        self._ended: set[int] = set()
        self._stopped = ""
        self._began = time.time()

    def stop(self, reason: str) -> None:
        """End the step early."""
        self._stopped = self._stopped or reason
        for process in self.processes:
            process.terminate(_STOP_SECONDS)

    async def run(self) -> AsyncGenerator[events.Event, None]:
        """Yield all events but the first."""
        driver, recount = self._driver, self._driver.recount
        recount.reset()
        first = await asyncio.to_thread(lambda: list(islice(self._requests, 1)))
        route: Route = "completions"
        url = ""
        if self._target.kind != "shard-v3":
            route = route_of(self._target, self._settings, bool(first and first[0].messages))
            url = self._target.address
        scraper = MetricsScraper(url, self._settings)
        rest: asyncio.Task[None] | None = None
        try:
            await self._start(route)
            requests = chain(first, self._requests)
            feeder = RequestFeeder(self.processes, self._step, requests, recount.expect)
            waiting = set(range(len(self.processes)))
            while waiting and not self._over:
                number, message = await self._inbox.get()
                waiting.discard(number)
                async for event in self._handle(number, message):
                    yield event
            if not self._over:
                await feeder.feed_ahead()
                await scraper.start()
                self._began = time.time()
                origin = time.perf_counter() + _START_SECONDS
                for process in self.processes:
                    process.send(frames.BeginStep(origin))
                rest = asyncio.create_task(feeder.feed_rest())
            while not self._over:
                async for event in self._handle(*await self._inbox.get()):
                    yield event
            if rest is not None and rest.done() and not rest.cancelled():
                rest.result()  # raises what building requests raised
        finally:
            if rest is not None:
                rest.cancel()
                await asyncio.gather(rest, return_exceptions=True)
            await asyncio.gather(*(process.close() for process in self.processes))
            await scraper.stop()
        early = any(r.error is None and r.finish_reason in _EARLY_REASONS for r in self._records)
        for text in [*recount.notes(), *([_EARLY] if self._settings.ignore_eos and early else [])]:
            driver.note(text)
        records = sorted(self._records, key=lambda record: record.index)
        record = events.StepRecord(
            step=self._step,
            began=self._began,
            duration=measured_seconds(records)
            or sum(
                batch.prefill + sum(batch.decodes) for batch in self._batches if not batch.warmup
            ),
            requests=records,
            batches=self._batches,
            client=worst_of(self._clients),
            server=scraper.metrics(),
            stopped=self._stopped,
        )
        yield events.StepEnded(self._index, record)

    @property
    def _over(self) -> bool:
        return len(self._ended) == len(self.processes)

    async def _start(self, route: Route) -> None:
        """Start the processes, each with its share of the clients."""
        shares = _shares(self._step, self._target, self._settings)
        expected = self._step.requests or 0
        for number, clients in enumerate(shares):
            process = GeneratorProcess(number, self._inbox)
            self.processes.append(process)
            await process.start(
                frames.GeneratorJob(
                    self._target, self._step, self._settings, route, self._index, clients, expected
                )
            )

    async def _handle(
        self, number: int, message: frames.FromGenerator | GeneratorLost
    ) -> AsyncGenerator[events.Event, None]:
        """Take a message of a process, and yield its events."""
        match message:
            case frames.GeneratorReady():
                pass
            case frames.RequestFinished(record, text):
                record = await self._driver.recount.count(record, text)
                self._records.append(record)
                yield events.RequestDone(self._index, record)
            case events.BatchDone(_, batch):
                self._batches.append(batch)
                yield message
            case events.StepFailed():
                yield message
            case events.StepProgress():
                self._progress[number] = message
                if number == min(set(range(len(self.processes))) - self._ended):
                    yield self._total_progress()
            case frames.RunNote(text):
                self._driver.note(text)
            case frames.GeneratorEnded(client, stopped):
                self._ended.add(number)
                self._clients.append(client)
                self._stopped = self._stopped or stopped
            case GeneratorLost(cause, remedy):
                self._ended.add(number)
                if not self._stopped:
                    yield events.StepFailed(self._index, cause, remedy, True)
                    self.stop(cause)

    def _total_progress(self) -> events.StepProgress:
        """The progress of all processes together."""
        parts = self._progress.values()
        summed = ("done", "in_flight", "errors", "tokens_per_second")
        return events.StepProgress(
            index=self._index,
            expected=self._step.requests or 0,
            elapsed=max(part.elapsed for part in parts),
            **{name: sum(getattr(part, name) for part in parts) for name in summed},
        )


def _shares(
    step: events.BenchStep, target: events.BenchTarget, settings: RequestSettings
) -> list[int]:
    """The number of clients of each process; 0 for other kinds of load."""
    if step.kind == "batch" or target.kind == "shard-v3":
        return [0]
    streams = int(step.value)
    cores = os.cpu_count() or 1
    wanted = min(-(-streams // _STREAMS_PER_PROCESS), max(1, cores // 2))
    number = max(1, settings.processes or wanted)
    if step.kind == "rate":
        return [0] * number
    number = min(number, streams)
    return [streams // number + (rank < streams % number) for rank in range(number)]


def _check(step: events.BenchStep, target: events.BenchTarget, settings: RequestSettings) -> None:
    """Raise ConfigError for an invalid step, before a process starts for it."""
    if target.kind != "shard-v3":
        request_head(target.address, "/", settings.headers)
    elif step.kind != "batch":
        raise ConfigError(
            f"a shard is driven in batches, not by {step.kind}", "name a server's URL instead"
        )
    if step.value <= 0 or (step.kind != "rate" and step.value != int(step.value)):
        raise ConfigError(
            f"{step.value:g} is not a valid {step.kind}: whole numbers above 0, or a rate above 0",
            "give a number above 0",
        )
