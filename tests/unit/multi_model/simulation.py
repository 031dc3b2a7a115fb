"""Requests for several models in simulated time, under the scheduler."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tgi_cli.multi_model.model_scheduler import (
    LoadState,
    ModelScheduler,
    QueueFullError,
    ScheduledModel,
    SwitchPolicy,
    Ticket,
)


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, for which model, and how long it runs once admitted."""

    time: float
    model: str
    seconds: float


class Simulation:
    """Plays arrivals; loads and unloads take fixed times.

    Attributes:
        served: Requests that have run to their end, by number of their arrival.
        cut: Requests that were running when their model was unloaded.
        refused: Requests that could not wait, with the time after which to try again.
        loads: Models in the order of their loads.
        waits: Seconds that each served request waited.
    """

    def __init__(
        self,
        memory: dict[str, int],
        policy: SwitchPolicy,
        load_seconds: float = 5.0,
        failures: Callable[[str, int], bool] = lambda model, load: False,
        idle_seconds: float = 0.0,
    ) -> None:
        models = [
            ScheduledModel(name=name, memory=size, idle_seconds=idle_seconds)
            for name, size in memory.items()
        ]
        self.scheduler = ModelScheduler(models, policy)
        self._memory = memory
        self._load_seconds = load_seconds
        self._failures = failures
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrivals: dict[int, tuple[int, Arrival]] = {}
        self._running: dict[str, set[int]] = {name: set() for name in memory}
        self._tickets: dict[int, Ticket] = {}
        self.now = 0.0
        self.served: list[int] = []
        self.cut: list[int] = []
        self.refused: list[tuple[int, float]] = []
        self.failed: list[int] = []
        self.loads: list[str] = []
        self.waits: list[float] = []

    def run(self, arrivals: Sequence[Arrival], most_events: int = 100_000) -> None:
        for index, arrival in enumerate(arrivals):
            self._at(arrival.time, partial(self._arrive, index, arrival))
        for _ in range(most_events):
            if not self._events:
                return
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._plan()
            self._check()
        raise AssertionError("it does not come to an end")

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def _arrive(self, index: int, arrival: Arrival) -> None:
        try:
            ticket = self.scheduler.arrive(arrival.model, self.now)
        except QueueFullError as error:
            self.refused.append((index, error.retry_after))
        else:
            self._arrivals[ticket.number] = index, arrival

    def _plan(self) -> None:
        plan = self.scheduler.plan(self.now)
        for ticket in plan.admitted:
            index, arrival = self._arrivals.pop(ticket.number)
            self.waits.append(self.now - ticket.arrived)
            self._running[arrival.model].add(index)
            self._at(self.now + arrival.seconds, partial(self._leave, index, arrival))
        for name in plan.unload:
            self.cut += sorted(self._running[name])
            for _ in self._running[name]:
                self.scheduler.leave(name, self.now)
            self._running[name].clear()
            self._at(self.now + 0.5, partial(self.scheduler.on_unloaded, name))
        for name in plan.load:
            self.loads.append(name)
            loaded = partial(self._end_load, name, len(self.loads))
            self._at(self.now + self._load_seconds, loaded)
        time = self.scheduler.next_time(self.now)
        if time < math.inf:
            self._at(time, lambda: None)

    def _end_load(self, name: str, load: int) -> None:
        if self._failures(name, load):
            for ticket in self.scheduler.on_load_failed(name):
                self.failed.append(self._arrivals.pop(ticket.number)[0])
        else:
            memory = self._memory[name]
            self.scheduler.on_loaded(name, memory, self._load_seconds, self.now)

    def _leave(self, index: int, arrival: Arrival) -> None:
        if index in self._running[arrival.model]:
            self._running[arrival.model].discard(index)
            self.scheduler.leave(arrival.model, self.now)
            self.served.append(index)

    def _check(self) -> None:
        scheduler, policy = self.scheduler, self.scheduler.policy
        assert scheduler.memory_taken <= policy.budget
        present = [m for m in scheduler.models.values() if m.state.takes_memory]
        assert not policy.most_loaded or len(present) <= policy.most_loaded
        for model in scheduler.models.values():
            running = len(self._running[model.name])
            assert model.running == running
            if running:
                assert model.state in (LoadState.LOADED, LoadState.DRAINING)


def first_come_loads(models: Sequence[str]) -> int:
    """Loads of a server that holds one model and takes requests strictly as they come."""
    return sum(1 for _ in itertools.groupby(models))
