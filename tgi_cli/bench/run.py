"""A whole run: starts the server if necessary, finds the target, and drives the plan's steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tgi_cli.bench import events
from tgi_cli.bench.plan import BenchOptions, BenchPlan, RequestsOfStep, plan_of
from tgi_cli.bench.saved_runs import EventLog, RunStarted, cut_short
from tgi_cli.bench.settings import RequestSettings
from tgi_cli.bench.step_driver import LoadDriver
from tgi_cli.bench.targets import ResolvedTarget, resolve_target
from tgi_cli.bench.workloads.build import described, notes_of, requests_of
from tgi_cli.process import machine
from tgi_cli.process.managed_server import start_server
from tgi_cli.version import __version__

INTERRUPTED = "interrupted"


class PlanRunner:
    """Drives the steps of a plan.

    Args:
        requests: Builds the requests of each step.
        fields: Other fields of the BenchRun: ``command``, ``machine``, ``workload``, ``slo``,
            ``notes``.
    """

    def __init__(
        self,
        plan: BenchPlan,
        target: events.BenchTarget,
        driver: LoadDriver,
        requests: RequestsOfStep,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan = plan
        self._driver = driver
        self._requests = requests
        known: dict[str, Any] = {"command": [], "machine": {}, "workload": {}, **(fields or {})}
        self.begun = events.BenchRun(
            created=time.time(), tgi=__version__, target=target, steps=[], **known
        )
        self._stopped = ""
        self._failure = ""

    def stop(self, reason: str = "stopped") -> None:
        """End the run early; a note gives the reason. Call it on the loop of the run."""
        self._stopped = self._stopped or reason
        self._driver.stop(reason)

    async def run(self, on_event: Callable[[events.Event], None]) -> events.BenchRun:
        """Run all steps of the plan, as far as possible.

        A failed step is reported, and the next one begins. The run ends early if it is stopped, if
        its load generator died, or if the target no longer accepts connections.

        Args:
            on_event: Called with every event; the last is RunEnded with the whole run, also if the
                task is cancelled.
        """
        steps: list[events.StepRecord] = []
        notes = list(self.begun.notes)
        cancelled = False
        try:
            notes += await self._run_steps(steps, on_event)
        except asyncio.CancelledError:
            cancelled = True
            notes.append("the run was cancelled")
        notes += [note for note in self._driver.notes if note not in notes]
        run = msgspec.structs.replace(self.begun, steps=steps, notes=notes, failure=self._failure)
        on_event(events.RunEnded(run))
        if cancelled:
            raise asyncio.CancelledError
        return run

    async def _run_steps(
        self, steps: list[events.StepRecord], on_event: Callable[[events.Event], None]
    ) -> list[str]:
        search = self._plan.search()
        step = next(search, None)
        while step is not None and not self._stopped:
            record, failure = await self._run_step(step, steps, on_event)
            if record is not None:
                steps.append(record)
            if self._stopped:
                break
            if record is None:
                failure = failure or "the step left no record"
            elif (
                not failure
                and record.requests
                and all(request.error == "connect" for request in record.requests)
            ):
                failure = "the target accepts no connections"
            if failure or record is None:
                self._failure = f"the run ended at {step.kind} {step.label}: {failure}"
                return [self._failure]
            try:
                step = search.send(record)
            except StopIteration as end:
                return list(end.value)
        return [f"the run was {self._stopped} before its end"] if self._stopped else []

    async def _run_step(
        self,
        step: events.BenchStep,
        steps: list[events.StepRecord],
        on_event: Callable[[events.Event], None],
    ) -> tuple[events.StepRecord | None, str]:
        """Run one step; if cancelled, append what it has to ``steps``.

        Returns: Its record, and the error that ends the run, if any.
        """
        index = len(steps)
        record, failure = None, ""
        partial = events.StepRecord(
            step=step, began=time.time(), duration=0.0, requests=[], batches=[]
        )
        drive = self._driver.drive(step, self._requests(step, index), index, self._plan.total)
        try:
            async with contextlib.aclosing(drive) as stream:
                async for event in stream:
                    if isinstance(event, events.StepEnded):
                        record = event.record
                    elif isinstance(event, events.RequestDone):
                        partial.requests.append(event.record)
                    elif isinstance(event, events.BatchDone):
                        partial.batches.append(event.record)
                    elif isinstance(event, events.StepFailed) and event.fatal:
                        failure = event.cause
                    on_event(event)
        except asyncio.CancelledError:
            steps.append(record or cut_short(partial, "the run was cancelled"))
            raise
        return record, failure


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its target.

    Attributes:
        address: URL or shard socket; empty to start a server for ``model``.
        model: Model of the server to start; empty for the bundled one.
        tokenizer_name: Model id or folder. Default: the target's model.
        serve_arguments: Additional arguments for ``tgi serve``.
        command: The command line, without secrets.
        jsonl: File for the events as they occur.
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
    """Does one run; any thread can stop it.

    Args:
        log_line: Called with lines about what the run waits for before the first step.

    Attributes:
        url: URL of the HTTP server, once it is known.
        model: Model's name, once the server has reported it; empty before.
    """

    def __init__(
        self, config: BenchConfig, log_line: Callable[[str], None] = lambda line: None
    ) -> None:
        self.config = config
        self._log_line = log_line
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[events.BenchRun] | None = None
        self._runner: PlanRunner | None = None
        self._stopped = ""
        self.url: str | None = None
        self.model = ""
        self.plan = plan_of(config.options)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run."""
        return self._stopped == INTERRUPTED

    def stop(self, reason: str = "stopped") -> None:
        """End the run early with the steps so far, or at once if called again or before a step.

        A server that was started is stopped in either case.
        """
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._stop, reason)

    def _stop(self, reason: str) -> None:
        if self._runner is not None and not self._stopped:
            self._runner.stop(reason)
        elif self._task is not None:
            self._task.cancel()
        self._stopped = self._stopped or reason

    def run(
        self, on_event: Callable[[events.Event], None], *, signals: bool = False
    ) -> events.BenchRun:
        """Do the run on an event loop of its own.

        Args:
            signals: Whether SIGINT and SIGTERM stop it (main thread only).

        Raises:
            TgiError: The target is unavailable, or the workload is invalid.
            KeyboardInterrupt: Stopped before the first step.
        """
        try:
            return asyncio.run(self._run(on_event, signals))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _run(
        self, on_event: Callable[[events.Event], None], signals: bool
    ) -> events.BenchRun:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._stop, INTERRUPTED)
        config, options, settings = self.config, self.config.options, self.config.settings
        async with self._resolved() as found:
            driver = LoadDriver(found.target, settings, found.tokenizer)
            requests = requests_of(options, found.tokenizer)
            name = config.tokenizer_name or found.target.model
            fields = {
                "command": config.command,
                "machine": machine.describe(),
                "workload": described(options, settings, name),
                "slo": options.slo,
                "notes": [*notes_of(options), *found.notes],
            }
            self._runner = PlanRunner(self.plan, found.target, driver, requests, fields)
            if config.jsonl is None:
                return await self._runner.run(on_event)
            with contextlib.closing(EventLog(config.jsonl)) as log:
                log(RunStarted(self._runner.begun))

                def log_event(event: events.Event) -> None:
                    log(event)
                    on_event(event)

                return await self._runner.run(log_event)

    @contextlib.asynccontextmanager
    async def _resolved(self) -> AsyncIterator[ResolvedTarget]:
        """The target; a server that was started ends with the block."""
        config = self.config
        async with contextlib.AsyncExitStack() as stack:
            address, name, command = config.address, config.tokenizer_name, None
            if not address:
                shard = config.options.load == "batch"
                revision = ("--revision", config.revision) if config.revision else ()
                arguments = (*revision, *config.serve_arguments)
                server = await stack.enter_async_context(
                    start_server(config.model, arguments, shard=shard, log_line=self._log_line)
                )
                address = str(server.socket) if shard else server.url
                name, command, self.url = name or config.model, server.command, server.url
            found = await resolve_target(
                address,
                config.settings,
                tokenizer_name=name,
                revision=config.revision,
                started_here=command,
            )
            self.model = found.target.model
            if found.target.kind in ("tgi", "openai"):
                self.url = found.target.address
            yield found
