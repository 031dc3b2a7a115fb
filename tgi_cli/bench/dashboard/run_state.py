"""The state of a run as its events describe it, independent of screens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tgi_cli.bench import events
from tgi_cli.bench.statistics.observations import measured_seconds

Emit = Callable[[events.Event | str], None]
"""Sends the screen an event, or a line of text about what is awaited before the first step."""
Url = str | Callable[[], str | None] | None
"""URL of a server, or a function that returns it once the server has started."""
LIVE_REQUESTS = 4000
"""Requests by which a running step is shown: the latest, so that its metrics cost the same all
along. A step that has ended is shown by all of them."""
LIVE_BATCHES = 10_000


@dataclass(frozen=True, slots=True)
class ScreenTitle:
    """The first line: the model, and what all steps share (``Sequence Length: 10``).

    Of the details, the last ones are left out where the line is too short.
    """

    model: str
    details: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: events.BenchRun) -> ScreenTitle:
        """The title of a saved run."""
        lengths = lengths_of(run.workload)
        target = f"{run.target.kind} {run.target.address}".strip()
        details = lengths if "sequence_length" in run.workload else (*lengths, target)
        return cls(run.target.model, details)


def lengths_of(workload: Mapping[str, Any]) -> tuple[str, ...]:
    """The lengths of a workload (``BenchRun.workload``), by text-generation-benchmark's names."""
    names = {
        "sequence_length": "Sequence Length",
        "decode_length": "Decode Length",
        "input_tokens": "Input Length",
        "output_tokens": "Output Length",
    }
    return tuple(f"{name}: {workload[key]}" for key, name in names.items() if workload.get(key))


@dataclass(slots=True, eq=False, repr=False)
class StepState:
    """A step that runs or has run.

    Attributes:
        requests, batches: Those so far; the record's own once there is one.
        failures: Failures of the step as a whole, one line each.
        request_errors: Number of failed requests.
        accepted_drafts: Draft tokens that the server has accepted while the step runs, or None if
            it does not count them.
        version: Grows with everything that the metrics depend on.
    """

    index: int
    step: events.BenchStep
    requests: list[events.BenchRequestRecord] = field(default_factory=list)
    batches: list[events.BatchRecord] = field(default_factory=list)
    progress: events.StepProgress | None = None
    record: events.StepRecord | None = None
    failures: list[str] = field(default_factory=list)
    request_errors: int = 0
    accepted_drafts: float | None = None
    version: int = 0

    @property
    def label(self) -> str:
        """The label of its tab."""
        kinds = {"batch": "Batch: ", "concurrency": "Clients: "}
        return kinds.get(self.step.kind, "") + self.step.label

    @property
    def bad(self) -> bool:
        """Whether anything failed."""
        return bool(self.failures or self.request_errors)

    @property
    def share(self) -> float | None:
        """The completed share, 0 to 1, or None if the end is unknown."""
        if self.record is not None:
            return 1.0
        if self.progress is None:
            return 0.0
        shares = []
        if self.progress.expected:
            shares.append(self.progress.done / self.progress.expected)
        if self.step.seconds:
            shares.append(self.progress.elapsed / self.step.seconds)
        return min(max(shares), 1.0) if shares else None

    def snapshot(self) -> events.StepRecord:
        """The record, or one of what there is so far, for another thread to read."""
        if self.record is not None:
            return self.record
        requests = self.requests[-LIVE_REQUESTS:]
        elapsed = self.progress.elapsed if self.progress else 0.0
        server = {}
        if self.accepted_drafts is not None:
            share = len(requests) / max(len(self.requests), 1)
            server["tgi_draft_accepted_tokens_total"] = self.accepted_drafts * share
        return events.StepRecord(
            step=self.step,
            began=0.0,
            duration=measured_seconds(requests) or elapsed,
            requests=requests,
            batches=self.batches[-LIVE_BATCHES:],
            server=server,
        )


@dataclass(eq=False)
class RunState:
    """Everything that the screens show of a run.

    Attributes:
        steps: Steps in the order in which they began.
        total: Number of steps, or 0 if unknown.
        running: The running step.
        run: The whole run, once it has ended.
        fatal: Cause and remedy of what ended the run early.
        waiting_for: What is awaited before the first step.
        error: The latest error, for the message line; ``errors`` counts them.
        version: Grows with every event.
    """

    steps: list[StepState] = field(default_factory=list)
    total: int = 0
    running: StepState | None = None
    run: events.BenchRun | None = None
    fatal: tuple[str, str] | None = None
    waiting_for: str = ""
    error: str = ""
    errors: int = 0
    version: int = 0

    @classmethod
    def of(cls, run: events.BenchRun) -> RunState:
        """The state of a saved run."""
        state = cls()
        state.apply(events.RunEnded(run))
        return state

    @property
    def done(self) -> int:
        """Number of steps that have ended."""
        return sum(step.record is not None for step in self.steps)

    @property
    def bad(self) -> bool:
        """Whether anything failed."""
        return self.fatal is not None or any(step.bad for step in self.steps)

    def step(self, index: int) -> StepState | None:
        """The step with that index."""
        return next((step for step in self.steps if step.index == index), None)

    def apply(self, event: events.Event | str) -> None:
        """Take an event."""
        self.version += 1
        match event:
            case str():
                self.waiting_for = event
            case events.StepStarted():
                self._begin(event.index, event.step, event.total)
            case events.RunEnded(run):
                self.run = run
                for index, record in enumerate(run.steps):
                    state = self.step(index) or self._begin(index, record.step, self.total)
                    if state.record is None:
                        self._end(state, record)
                self.running = None
                self.total = max(self.total, len(self.steps))
            case events.StepFailed():
                self._fail(event)
            case (
                events.StepEnded()
                | events.StepProgress()
                | events.RequestDone()
                | events.BatchDone()
            ):
                step = self.step(event.index)
                if step is not None and isinstance(event, events.StepEnded):
                    self._end(step, event.record)
                elif step is not None and step.record is None:
                    self._advance(step, event)

    def count_drafts(self, accepted: float | None) -> None:
        """Take the draft tokens that the server has accepted since the last call, if it counts."""
        if self.running is not None and accepted is not None:
            self.running.accepted_drafts = (self.running.accepted_drafts or 0.0) + accepted

    def give_up(self, cause: str, remedy: str = "") -> None:
        """End the run without a record."""
        self.version += 1
        self.fatal = (cause, remedy)
        self.running = None

    def _begin(self, index: int, step: events.BenchStep, total: int) -> StepState:
        self.steps = [other for other in self.steps if other.index != index]
        self.running = StepState(index, step)
        self.steps.append(self.running)
        self.total = total
        self.waiting_for = ""
        return self.running

    def _advance(self, step: StepState, event: events.Event) -> None:
        if isinstance(event, events.StepProgress):
            step.progress = event
            return
        step.version += 1
        if isinstance(event, events.BatchDone):
            step.batches.append(event.record)
        elif isinstance(event, events.RequestDone):
            record = event.record
            step.requests.append(record)
            if record.error is not None:
                step.request_errors += 1
                self._report(f"{step.label}: request {record.index}: {error_of(record)}")

    def _end(self, step: StepState, record: events.StepRecord) -> None:
        step.version += 1
        step.record = record
        step.requests, step.batches = record.requests, record.batches
        step.request_errors = sum(request.error is not None for request in step.requests)
        if self.running is step:
            self.running = None

    def _fail(self, event: events.StepFailed) -> None:
        step = self.step(event.index)
        text = event.cause
        if step is not None:
            text = f"{step.label}: {event.cause}"
            step.failures.append(event.cause)
        self._report(text)
        if event.fatal:
            self.fatal = (text, event.remedy)

    def _report(self, text: str) -> None:
        self.error = text
        self.errors += 1

    def __iter__(self) -> Iterator[StepState]:
        return iter(self.steps)


def error_of(record: events.BenchRequestRecord) -> str:
    """The error of a request in a few words."""
    return f"{record.error}: {record.detail}" if record.detail else str(record.error)


class EventQueue:
    """Passes events from the thread of the run to the thread of the screen.

    Any thread may call ``put``; everything else is for the screen.

    Attributes:
        result: What the run returned.
        failure: What the run raised.
    """

    def __init__(self) -> None:
        # Its operations are atomic, so putting an event never waits for the screen.
        self._events: deque[events.Event | str] = deque()
        self._over = threading.Event()
        self.result: events.BenchRun | None = None
        self.failure: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended; its last events may still be queued."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the run; return whether it has ended."""
        return self._over.wait(seconds)

    def put(self, event: events.Event | str) -> None:
        """Add an event, or a line about what is awaited."""
        self._events.append(event)

    def drain(self) -> Iterator[events.Event | str]:
        """Yield the events since the last call, oldest first."""
        for _ in range(len(self._events)):
            yield self._events.popleft()

    def follow(self, start: Callable[[Emit], events.BenchRun]) -> None:
        """Do the run in a daemon thread."""

        def follow() -> None:
            try:
                run = start(self.put)
            except BaseException as error:  # raised again by the screen, in the main thread
                self.failure = error
            else:
                self.result = run
                self.put(events.RunEnded(run))
            self._over.set()

        threading.Thread(target=follow, name="bench", daemon=True).start()
