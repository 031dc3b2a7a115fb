"""A run from nothing to its end: the server if it is ours to start, the target, the steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

import tgi_cli
from tgi_cli.bench import machine
from tgi_cli.bench.events import (
    BatchDone,
    BenchRequest,
    BenchRun,
    BenchStep,
    BenchTarget,
    Event,
    RequestDone,
    RunEnded,
    StepEnded,
    StepFailed,
    StepRecord,
)
from tgi_cli.bench.managed_server import start_server
from tgi_cli.bench.plan import BenchOptions, BenchPlan, RequestsOfStep, plan_of
from tgi_cli.bench.saved_runs import EventLog, RunStarted, cut_short
from tgi_cli.bench.settings import RequestSettings
from tgi_cli.bench.step_driver import LoadDriver
from tgi_cli.bench.targets import ResolvedTarget, resolve_target
from tgi_cli.bench.workloads.build import described, notes_of, requests_of

INTERRUPTED = "interrupted"


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured, and where.

    Attributes:
        address: a URL or a shard's socket; empty: a server is started for ``model``.
        model: of the server to start; empty: the bundled one.
        tokenizer_name: an id or a folder; empty: the target's model.
        serve_arguments: more for ``tgi serve``.
        command: the command line, without secrets.
        jsonl: where events are written as they happen.
    """

    options: BenchOptions
    settings: RequestSettings
    address: str = ""
    model: str = ""
    tokenizer_name: str = ""
    revision: str = ""
    serve_arguments: tuple[str, ...] = ()
    command: list[str] = []
    jsonl: Path | None = None


class BenchJob:
    """Does what was asked for, once; can be stopped from any thread.

    Args:
        say: gets lines on what is waited for before the first step.

    Attributes:
        url: of the HTTP server, once it is known that there is one.
    """

    def __init__(
        self, request: BenchConfig, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._request = request
        self._say = say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[BenchRun] | None = None
        self._runner: PlanRunner | None = None
        self._stopped = ""
        self.url: str | None = None
        self.plan = plan_of(request.options)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it."""
        return self._stopped == INTERRUPTED

    def stop(self, reason: str = "stopped") -> None:
        """End it soon: the steps so far are kept; asked again, or before the first step, at once.

        A server that was started is stopped either way.
        """
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it closed meanwhile: all is over
                loop.call_soon_threadsafe(self._stop, reason)

    def _stop(self, reason: str) -> None:
        if self._runner is not None and not self._stopped:
            self._runner.stop(reason)
        elif self._task is not None:
            self._task.cancel()
        self._stopped = self._stopped or reason

    def run(self, on_event: Callable[[Event], None], *, signals: bool = False) -> BenchRun:
        """Do it, on a loop of this thread's own.

        Args:
            signals: SIGINT and SIGTERM stop it (main thread only).

        Raises:
            TgiError: the target cannot be had, or the workload cannot be.
            KeyboardInterrupt: stopped before there was anything to keep.
        """
        try:
            return asyncio.run(self._run(on_event, signals))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _run(self, on_event: Callable[[Event], None], signals: bool) -> BenchRun:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._stop, INTERRUPTED)
        async with self._found() as found:
            return await self._measure(found, on_event)

    @contextlib.asynccontextmanager
    async def _found(self) -> AsyncIterator[ResolvedTarget]:
        request = self._request
        if request.address:
            found = await resolve_target(
                request.address,
                request.settings,
                tokenizer_name=request.tokenizer_name,
                revision=request.revision,
            )
            if found.target.kind in ("tgi", "openai"):
                self.url = found.target.address
            yield found
            return
        shard = request.options.load == "batch"
        revision = ("--revision", request.revision) if request.revision else ()
        arguments = (*revision, *request.serve_arguments)
        async with start_server(request.model, arguments, shard=shard, say=self._say) as server:
            self.url = server.url
            address = str(server.socket) if shard else server.url
            yield await resolve_target(
                address,
                request.settings,
                tokenizer_name=request.tokenizer_name or request.model,
                revision=request.revision,
                started_here=server.command,
            )

    async def _measure(self, found: ResolvedTarget, on_event: Callable[[Event], None]) -> BenchRun:
        request = self._request
        requests = requests_of(request.options, found.tokenizer)
        driver = LoadDriver(found.target, request.settings, found.tokenizer)
        about = {
            "command": request.command,
            "machine": machine.describe(),
            "workload": described(
                request.options, request.settings, request.tokenizer_name or found.target.model
            ),
            "slo": request.options.slo,
            "notes": [*notes_of(request.options), *found.notes],
        }
        self._runner = PlanRunner(self.plan, found.target, driver, requests, about)
        if request.jsonl is None:
            return await self._runner.run(on_event)
        with contextlib.closing(EventLog(request.jsonl)) as lines:
            lines(RunStarted(self._runner.begun))
            return await self._runner.run(broadcast(lines, on_event))


class StepDriver(Protocol):
    """What a run asks of a driver (``drive.Driver``)."""

    notes: list[str]

    def drive(
        self, step: BenchStep, requests: Iterable[BenchRequest], index: int = 0, total: int = 0
    ) -> AsyncGenerator[Event, None]:
        """The events of one step; the last is its StepEnded."""

    def stop(self, reason: str = "stopped") -> None:
        """End the running step."""


class PlanRunner:
    """Does one run.

    Args:
        requests: of each step.
        about: the other fields of the Run: ``command``, ``machine``, ``workload``, ``slo``,
            ``notes``.
    """

    def __init__(
        self,
        plan: BenchPlan,
        target: BenchTarget,
        driver: StepDriver,
        requests: RequestsOfStep,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan = plan
        self._driver = driver
        self._requests = requests
        fields: dict[str, Any] = {"command": [], "machine": {}, "workload": {}, **(about or {})}
        self.begun = BenchRun(
            created=time.time(), tgi=tgi_cli.__version__, target=target, steps=[], **fields
        )
        self._stopped = ""
        self._failure = ""

    def stop(self, reason: str = "stopped") -> None:
        """End the run soon, with what there is; a note says why. To be called on its loop."""
        self._stopped = self._stopped or reason
        self._driver.stop(reason)

    async def run(self, on_event: Callable[[Event], None]) -> BenchRun:
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
            if failure is None and record is not None and _unreachable(record):
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
        self, step: BenchStep, steps: list[StepRecord], on_event: Callable[[Event], None]
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


def _unreachable(record: StepRecord) -> bool:
    """Whether no connection of the step came about: every further step would say the same."""
    requests = record.requests
    return bool(requests) and all(request.error == "connect" for request in requests)


def broadcast(*listeners: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """One listener that tells several; None among them is left out."""
    heard = [listener for listener in listeners if listener is not None]

    def tell(event: Event) -> None:
        for listener in heard:
            listener(event)

    return tell
