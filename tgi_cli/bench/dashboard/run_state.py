"""What is known of a run so far: the events, put together. Knows nothing of screens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tgi_cli.bench.events import (
    BatchDone,
    BatchRecord,
    BenchRequestRecord,
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

Emit = Callable[[Event | str], None]
"""Sends the screen an event, or a line of text about what is awaited before the first step."""
Url = str | Callable[[], str | None] | None
"""URL of a server, or a function that returns it once the server has started."""
LIVE_REQUESTS = 4000
"""A step that runs is shown by its latest requests, so that its figures cost the same all along;
once it has ended it is shown by all of them."""
LIVE_BATCHES = 10_000


@dataclass(frozen=True, slots=True)
class ScreenTitle:
    """The first line: the model, and what is the same in all steps (``Sequence Length: 10``)."""

    model: str
    details: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: BenchRun) -> ScreenTitle:
        """That of a saved run, from its target and workload."""
        workload = run.workload
        details = [
            f"{label}: {workload[key]}"
            for key, label in (
                ("sequence_length", "Sequence Length"),
                ("decode_length", "Decode Length"),
            )
            if workload.get(key)
        ]
        if not details:
            details = [f"{run.target.kind} {run.target.address}".strip()]
        return cls(run.target.model, tuple(details))


@dataclass(slots=True, eq=False, repr=False)
class StepState:
    """One step, running or run.

    Attributes:
        requests, batches: so far; the record's own once there is one.
        failures: what failed in it as a whole, one line each.
        request_errors: how many of its requests failed.
        version: grows with everything that its figures depend on.
    """

    index: int
    step: BenchStep
    requests: list[BenchRequestRecord] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    progress: StepProgress | None = None
    record: StepRecord | None = None
    failures: list[str] = field(default_factory=list)
    request_errors: int = 0
    version: int = 0

    @property
    def label(self) -> str:
        """For its tab."""
        match self.step.kind:
            case "batch":
                return f"Batch: {self.step.label}"
            case "concurrency":
                return f"Clients: {self.step.label}"
        return self.step.label

    @property
    def bad(self) -> bool:
        """Whether anything in it failed."""
        return bool(self.failures or self.request_errors)

    @property
    def share(self) -> float | None:
        """How much of it is done, 0 to 1; None where its end is not known."""
        if self.record is not None:
            return 1.0
        seen = self.progress
        if seen is None:
            return 0.0
        shares = []
        if seen.expected:
            shares.append(seen.done / seen.expected)
        if self.step.seconds:
            shares.append(seen.elapsed / self.step.seconds)
        return min(max(shares), 1.0) if shares else None

    def snapshot(self) -> StepRecord:
        """Its record, or one of what it has so far; safe to be read by another thread."""
        if self.record is not None:
            return self.record
        requests = self.requests[-LIVE_REQUESTS:]
        elapsed = self.progress.elapsed if self.progress else 0.0
        counted = [request for request in requests if not request.warmup]
        if counted:
            first = min(request.scheduled for request in counted)
            elapsed = max(max(request.finished for request in counted) - first, 1e-9)
        return StepRecord(
            step=self.step,
            began=0.0,
            duration=elapsed,
            requests=requests,
            batches=self.batches[-LIVE_BATCHES:],
        )


class RunState:
    """Everything that the screens show of a run.

    Attributes:
        steps: in the order in which they began.
        total: how many there will be; 0: not known.
        running: the step that runs.
        run: the whole run, once it is over.
        fatal: why the run ended early, cause and remedy.
        saying: what is waited for before the first step.
        error: the newest thing that failed, for the message line; ``errors`` counts them.
        version: grows with every event.
    """

    def __init__(self) -> None:
        self.steps: list[StepState] = []
        self.total = 0
        self.running: StepState | None = None
        self.run: BenchRun | None = None
        self.fatal: tuple[str, str] | None = None
        self.saying = ""
        self.error = ""
        self.errors = 0
        self.version = 0
        self._by_index: dict[int, StepState] = {}

    @classmethod
    def of(cls, run: BenchRun) -> RunState:
        """That of a run that is over."""
        board = cls()
        board.total = len(run.steps)
        for index, record in enumerate(run.steps):
            board._begin(StepStarted(index, len(run.steps), record.step))
            board._end(StepEnded(index, record))
        board.run = run
        return board

    @property
    def done(self) -> int:
        """Steps that have ended."""
        return sum(step.record is not None for step in self.steps)

    @property
    def bad(self) -> bool:
        """Whether anything failed."""
        return self.fatal is not None or any(step.bad for step in self.steps)

    def step(self, index: int) -> StepState | None:
        """The step of that index."""
        return self._by_index.get(index)

    def apply(self, event: Event | str) -> None:
        """Take in what happened."""
        self.version += 1
        match event:
            case str():
                self.saying = event
            case StepStarted():
                self._begin(event)
            case StepEnded():
                self._end(event)
            case StepFailed():
                self._fail(event)
            case RunEnded(run):
                self._close(run)
            case StepProgress() | RequestDone() | BatchDone():
                step = self._by_index.get(event.index)
                if step is not None and step.record is None:
                    self._advance(step, event)

    def give_up(self, cause: str, remedy: str = "") -> None:
        """The run is over, and there is no record of it."""
        self.version += 1
        self.fatal = (cause, remedy)
        self.running = None

    def _begin(self, event: StepStarted) -> None:
        state = StepState(event.index, event.step)
        if event.index in self._by_index:
            self.steps.remove(self._by_index[event.index])
        self.steps.append(state)
        self._by_index[event.index] = state
        self.total = event.total
        self.running = state
        self.saying = ""

    def _advance(self, step: StepState, event: StepProgress | RequestDone | BatchDone) -> None:
        if isinstance(event, StepProgress):
            step.progress = event
            return
        step.version += 1
        if isinstance(event, BatchDone):
            step.batches.append(event.record)
            return
        record = event.record
        step.requests.append(record)
        if record.error is not None:
            step.request_errors += 1
            self._report(f"{step.label}: request {record.index}: {described(record)}")

    def _end(self, event: StepEnded) -> None:
        step = self._by_index.get(event.index)
        if step is None:
            return
        step.version += 1
        step.record = event.record
        step.requests, step.batches = event.record.requests, event.record.batches
        step.request_errors = sum(request.error is not None for request in step.requests)
        if self.running is step:
            self.running = None

    def _fail(self, event: StepFailed) -> None:
        step = self._by_index.get(event.index)
        text = f"{step.label}: {event.cause}" if step is not None else event.cause
        if step is not None:
            step.failures.append(event.cause)
        self._report(text)
        if event.fatal:
            self.fatal = (text, event.remedy)

    def _close(self, run: BenchRun) -> None:
        self.run = run
        self.running = None
        for index, record in enumerate(run.steps):
            state = self._by_index.get(index)
            if state is None:
                self._begin(StepStarted(index, self.total, record.step))
                self.running = None
            if state is None or state.record is None:
                self._end(StepEnded(index, record))
        self.total = max(self.total, len(self.steps))

    def _report(self, text: str) -> None:
        self.error = text
        self.errors += 1

    def __iter__(self) -> Iterator[StepState]:
        return iter(self.steps)


def described(record: BenchRequestRecord) -> str:
    """A request's error in a few words."""
    return f"{record.error}: {record.detail}" if record.detail else str(record.error)


class EventQueue:
    """Events that wait to be shown, and how the run came out.

    ``put`` may be called from any thread; everything else is the screen's.

    Attributes:
        result: what the run returned.
        failure: what it raised.
    """

    def __init__(self) -> None:
        # Its own operations are atomic, so that putting an event never waits for the screen.
        self._events: deque[Event | str] = deque()
        self._over = threading.Event()
        self.result: BenchRun | None = None
        self.failure: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether the run has come to its end; its last events may still wait."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the run's end, so long at most. Returns: whether it has come."""
        return self._over.wait(seconds)

    def put(self, event: Event | str) -> None:
        """Tell the screen what has happened, or in words what is waited for."""
        self._events.append(event)

    def drain(self) -> Iterator[Event | str]:
        """What has happened since the last time, oldest first."""
        for _ in range(len(self._events)):
            yield self._events.popleft()

    def follow(self, start: Callable[[Callable[[Event | str], None]], BenchRun]) -> None:
        """Do the run, in a thread of its own; it dies with the process."""

        def follow() -> None:
            try:
                run = start(self.put)
            except BaseException as error:  # raised again by the screen, in the main thread
                self.failure = error
            else:
                self.result = run
                self.put(RunEnded(run))
            self._over.set()

        threading.Thread(target=follow, name="bench", daemon=True).start()
