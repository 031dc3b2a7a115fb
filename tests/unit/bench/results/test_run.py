"""A run from its first step to its end, whichever way it ends."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import pytest

from tests.unit.bench.results.simulation import Server, saved
from tgi_cli.bench import plan
from tgi_cli.bench.events import (
    BenchRequest,
    BenchRun,
    BenchStep,
    Event,
    RequestDone,
    RunEnded,
    StepEnded,
    StepFailed,
    StepProgress,
    StepRecord,
    StepStarted,
)
from tgi_cli.bench.plan import BenchPlan, StepBounds
from tgi_cli.bench.run import PlanRunner
from tgi_cli.bench.text_output import TextReporter

TARGET = saved([]).target


class FakeDriver:
    """Answers each step at once; ``hangs`` makes a step wait until it is stopped."""

    def __init__(self, server: Server | None = None, **how: Any) -> None:
        self.notes: list[str] = []
        self.sent: list[str] = []
        self.closed = 0
        self._server = server or Server()
        self._how = how
        self._stop = asyncio.Event()
        self._why = ""
        self.hanging = asyncio.Event()

    def stop(self, reason: str = "stopped") -> None:
        self._why = reason
        self._stop.set()

    async def drive(
        self, step: BenchStep, requests: Iterable[BenchRequest], index: int = 0, total: int = 0
    ) -> AsyncGenerator[Event, None]:
        try:
            yield StepStarted(index, total, step)
            self.sent += [request.prompt for request in islice(requests, 2)]
            record = self._record(step)
            for done in record.requests[:3]:
                yield RequestDone(index, done)
            yield StepProgress(index, 3, 0, 11.0, int(step.value), 0, 12.5)
            if self._how.get("hangs") == step.label:
                self.hanging.set()
                await self._stop.wait()
                record = msgspec.structs.replace(record, stopped=self._why)
            if self._how.get("fails") == step.label:
                yield StepFailed(index, "the shard said no", "look", fatal=False)
            if self._how.get("dies") == step.label:
                yield StepFailed(index, "the load generator died", fatal=True)
            yield StepEnded(index, record)
        finally:
            self.closed += 1

    def _record(self, step: BenchStep) -> StepRecord:
        record = self._server.answer(step)
        if self._how.get("gone") != step.label:
            return record
        failed = [
            msgspec.structs.replace(request, error="connect", detail="refused")
            for request in record.requests
        ]
        return msgspec.structs.replace(record, requests=failed)


def requests(step: BenchStep, index: int) -> Iterator[BenchRequest]:
    number = 0
    while True:
        yield BenchRequest(prompt=f"{step.label} {number}", prompt_tokens=1, max_tokens=1)
        number += 1


def three_steps() -> BenchPlan:
    return plan.clients([1, 2, 3], StepBounds(requests=5, warmups=0))


def runner(driver: FakeDriver, steps: BenchPlan) -> PlanRunner:
    return PlanRunner(steps, TARGET, driver, requests, {"slo": {"ttft": 100.0}, "notes": ["known"]})


async def test_all_steps_run_and_report_their_events() -> None:
    driver = FakeDriver()
    driver.notes.append("the server says no usage")
    events: list[Event] = []
    run = await runner(driver, three_steps()).run(events.append)
    assert [record.step.label for record in run.steps] == ["1", "2", "3"]
    assert run.notes == ["known", "the server says no usage"]
    assert run.slo == {"ttft": 100.0}
    assert driver.sent == ["1 0", "1 1", "2 0", "2 1", "3 0", "3 1"]
    assert driver.closed == 3
    assert events[-1] == RunEnded(run)
    started = [event for event in events if isinstance(event, StepStarted)]
    assert [(event.index, event.total) for event in started] == [(0, 3), (1, 3), (2, 3)]


async def test_a_search_receives_its_records() -> None:
    driver = FakeDriver(Server(places=2))
    run = await runner(driver, plan.to_saturation(StepBounds(seconds=20))).run(lambda event: None)
    assert run.notes[1].startswith("knee at 2 clients")


async def test_a_step_that_fails_does_not_end_the_run() -> None:
    run = await runner(FakeDriver(fails="2"), three_steps()).run(lambda event: None)
    assert len(run.steps) == 3


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ({"dies": "2"}, "the run ended at concurrency 2: the load generator died"),
        ({"gone": "2"}, "the run ended at concurrency 2: the target accepts no connections"),
    ],
)
async def test_the_reason_of_an_early_end_is_noted(how: dict[str, str], note: str) -> None:
    run = await runner(FakeDriver(**how), three_steps()).run(lambda event: None)
    assert [record.step.label for record in run.steps] == ["1", "2"]
    assert run.notes == ["known", note]


async def test_stopping_keeps_completed_steps() -> None:
    made = runner(FakeDriver(hangs="2"), three_steps())
    task = asyncio.create_task(made.run(lambda event: None))
    await asyncio.sleep(0)
    while not task.done():
        made.stop("interrupted")
        await asyncio.sleep(0)
    run = await task
    assert run.notes == ["known", "the run was interrupted before its end"]
    assert len(run.steps) < 3


async def test_cancelling_tells_the_run_and_closes_the_step() -> None:
    driver = FakeDriver(hangs="2")
    events: list[Event] = []
    task = asyncio.create_task(runner(driver, three_steps()).run(events.append))
    async with asyncio.timeout(60):
        await driver.hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert [record.step.label for record in ended.run.steps] == ["1", "2"]
    assert len(ended.run.steps[1].requests) == 3
    assert ended.run.steps[1].stopped == "the run was cancelled"
    assert ended.run.notes == ["known", "the run was cancelled"]
    assert driver.closed == 2


async def test_text_output_has_a_line_per_step() -> None:
    out = io.StringIO()
    run = await runner(FakeDriver(fails="2"), three_steps()).run(TextReporter(out, {"ttft": 100.0}))
    lines = out.getvalue().splitlines()
    assert lines[0] == "[1/3] 1 client: 11 s, 3 done, 1 in flight, 12.5 tokens/s"
    assert lines[1].startswith("[1/3] 1 client: 5 responses, TTFT ")
    assert "100.0% within limits" in lines[1]
    assert "[2/3] 2 clients: error: the shard said no (look)" in lines
    assert lines[-1] == "note: known"
    assert len(run.steps) == 3


def test_batches_and_errors_in_the_plain_screen() -> None:
    out = io.StringIO()
    screen = TextReporter(out)
    step = plan.batch_step(4, 10, 1)
    screen(StepStarted(0, 0, step))
    screen(StepEnded(0, Server(spread=0).batch(step)))
    gone = FakeDriver(gone="2")._record(plan.client_step(2, StepBounds(requests=5, warmups=0)))
    screen(StepStarted(1, 0, gone.step))
    screen(StepEnded(1, gone))
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "[1] batch size 4: 10 runs, prefill 200.00 ms, 200.0 tokens/s, "
        "decode 10.00 ms per token, 400.0 tokens/s"
    )
    assert lines[1].endswith("errors: 5 connect")
    assert lines[2].strip() == "warning: every request failed: there are no latencies"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (plan.batch_step(8, 1, 0), "batch size 8"),
        (plan.client_step(1, StepBounds()), "1 client"),
        (plan.client_step(2, StepBounds()), "2 clients"),
        (plan.rate_step(2.5, StepBounds()), "2.5 requests/s"),
        (plan.rate_step(1, StepBounds(), "1 to 9/s"), "1 to 9 requests/s"),
        (plan.rate_step(1, StepBounds(), "trace x2"), "trace x2"),
    ],
)
def test_titles(step: BenchStep, said: str) -> None:
    assert step.title == said


def test_a_run_begins_with_its_known_fields() -> None:
    begun = runner(FakeDriver(), three_steps()).begun
    assert isinstance(begun, BenchRun)
    assert begun.steps == []
    assert begun.target == TARGET
    assert begun.tgi
