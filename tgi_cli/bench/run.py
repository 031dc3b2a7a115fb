"""A whole run: a plan's steps, one after the other, put on a target and told as they happen."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

import tgi_cli
from tgi_cli.bench.events import (
    BatchDone,
    Event,
    Request,
    RequestDone,
    Run,
    RunEnded,
    Step,
    StepEnded,
    StepFailed,
    StepRecord,
    Target,
)
from tgi_cli.bench.saved_runs import cut_short
from tgi_cli.bench.sweeps import Plan

Requests = Callable[[Step, int], Iterable[Request]]
"""What is sent in a step, by its position in the run."""


class Drives(Protocol):
    """What a run asks of a driver (``drive.Driver``)."""

    notes: list[str]

    def drive(
        self, step: Step, requests: Iterable[Request], index: int = 0, total: int = 0
    ) -> AsyncGenerator[Event, None]:
        """The events of one step; the last is its StepEnded."""

    def stop(self, reason: str = "stopped") -> None:
        """End the running step."""


class Runner:
    """Does one run.

    Args:
        requests: of each step.
        about: the other fields of the Run: ``command``, ``machine``, ``workload``, ``slo``,
            ``notes``.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        driver: Drives,
        requests: Requests,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan = plan
        self._driver = driver
        self._requests = requests
        fields: dict[str, Any] = {"command": [], "machine": {}, "workload": {}, **(about or {})}
        self.begun = Run(
            created=time.time(), tgi=tgi_cli.__version__, target=target, steps=[], **fields
        )
        self._stopped = ""
        self._failure = ""

    def stop(self, reason: str = "stopped") -> None:
        """End the run soon, with what there is; a note says why. To be called on its loop."""
        self._stopped = self._stopped or reason
        self._driver.stop(reason)

    async def run(self, on_event: Callable[[Event], None]) -> Run:
        """All steps of the plan, as far as they get.

        A step that fails is told of and the next one begins. The run ends before its plan does
        when it is stopped, when its load generator died, and when nothing answers any more.

        Args:
            on_event: is told everything, the whole run (RunEnded) last; also if the task was
                cancelled, which then goes on.
        """
        steps: list[StepRecord] = []
        notes = list(self.begun.notes)
        cancelled = False
        try:
            notes += await self._steps(steps, on_event)
        except asyncio.CancelledError:
            cancelled = True
            notes.append("the run was cancelled")
        notes += [note for note in self._driver.notes if note not in notes]
        run = msgspec.structs.replace(self.begun, steps=steps, notes=notes, failure=self._failure)
        on_event(RunEnded(run))
        if cancelled:
            raise asyncio.CancelledError
        return run

    async def _steps(self, steps: list[StepRecord], on_event: Callable[[Event], None]) -> list[str]:
        search = self._plan.search()
        step = next(search, None)
        while step is not None and not self._stopped:
            record, failure = await self._step(step, steps, on_event)
            if record is not None:
                steps.append(record)
            if self._stopped:
                break
            if failure is None and record is None:
                failure = "the step left no record"
            if failure is None and record is not None and _nobody_is_there(record):
                failure = "nothing answers there"
            if failure is not None or record is None:
                self._failure = f"the run ended at {step.kind} {step.label}: {failure}"
                return [self._failure]
            try:
                step = search.send(record)
            except StopIteration as end:
                return list(end.value)
        return [f"the run was {self._stopped} before its end"] if self._stopped else []

    async def _step(
        self, step: Step, steps: list[StepRecord], on_event: Callable[[Event], None]
    ) -> tuple[StepRecord | None, str | None]:
        """Runs one step; cancelled, it leaves what it has in ``steps``.

        Returns: its record, and what ends the run, if anything does.
        """
        index = len(steps)
        record: StepRecord | None = None
        failure: str | None = None
        partial = StepRecord(step=step, began=time.time(), duration=0.0, requests=[], batches=[])
        drive = self._driver.drive(step, self._requests(step, index), index, self._plan.total)
        try:
            async with contextlib.aclosing(drive) as events:
                async for event in events:
                    if isinstance(event, StepEnded):
                        record = event.record
                    elif isinstance(event, RequestDone):
                        partial.requests.append(event.record)
                    elif isinstance(event, BatchDone):
                        partial.batches.append(event.record)
                    elif isinstance(event, StepFailed) and event.fatal:
                        failure = event.cause
                    on_event(event)
        except asyncio.CancelledError:
            steps.append(record or cut_short(partial, "the run was cancelled"))
            raise
        return record, failure


def _nobody_is_there(record: StepRecord) -> bool:
    """Whether no connection of the step came about: every further step would say the same."""
    requests = record.requests
    return bool(requests) and all(request.error == "connect" for request in requests)


def both(*listeners: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """One listener that tells several; None among them is left out."""
    heard = [listener for listener in listeners if listener is not None]

    def tell(event: Event) -> None:
        for listener in heard:
            listener(event)

    return tell
