"""Decides which models are loaded, and when the requests for each may run. No I/O, no clock.

One queue in the order of arrival holds all requests whose model is not loaded. The model of the
oldest is loaded next; where it does not fit, the least recently used are unloaded: they take no
new requests, and are unloaded when those that run are done, or their time is up. All requests for a
model are admitted when it is loaded, not the oldest alone, and a model stays for a minimum time, so
that clients of two models that do not fit together do not have them loaded in turns for each
request. As only the oldest request displaces models, each is served after the models before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

_BYTES_PER_SECOND = 200e6
_START_SECONDS = 5.0
"""Assumed time to load a model that has not been loaded yet."""


class LoadState(StrEnum):
    """Phase of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    """Its requests run to their end, new ones wait in the queue."""
    UNLOADING = "unloading"

    @property
    def takes_memory(self) -> bool:
        """Whether its memory is taken, or reserved."""
        return self is not LoadState.UNLOADED


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPolicy:
    """When models are loaded and unloaded.

    Attributes:
        budget: bytes that all loaded models may take together.
        most_loaded: models that may be loaded at once; 0 for as many as fit.
        residence: seconds that a model stays loaded at least; for one that takes longer to load,
            as long as that takes, so that at most half of the time is spent on loading.
        drain: seconds that running requests have when their model is evicted.
        queue_size: requests that may wait at once.
        wait: longest expected wait in seconds, beyond which a request is refused.
    """

    budget: int
    most_loaded: int = 0
    residence: float = 10.0
    drain: float = 90.0
    queue_size: int = 256
    wait: float = 300.0


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledModel:
    """One model, as the scheduler sees it.

    Attributes:
        name: its name.
        memory: bytes that it takes when loaded, estimated at first and measured later.
        idle_seconds: time without requests after which it is unloaded; 0 for never.
        state: its phase.
        running: its requests that were admitted and have not left.
        load_seconds: time that its last load took, or None before it.
        loaded_at: time of its last load.
        used_at: time at which a request was last admitted or left.
        drain_until: end of its drain.
        asleep: it was unloaded because it was idle.
        unload_wanted: a client has asked for that.
    """

    name: str
    memory: int
    idle_seconds: float = 0.0
    state: LoadState = LoadState.UNLOADED
    running: int = 0
    load_seconds: float | None = None
    loaded_at: float = -math.inf
    used_at: float = -math.inf
    drain_until: float = math.inf
    asleep: bool = False
    unload_wanted: bool = False

    @property
    def expected_load_seconds(self) -> float:
        """Time that the next load takes, as measured or guessed."""
        if self.load_seconds is not None:
            return self.load_seconds
        return _START_SECONDS + self.memory / _BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue; without ``runs``, one that only wants its model loaded."""

    number: int
    model: str
    arrived: float
    runs: bool = True


@dataclass(slots=True)
class Plan:
    """What is to be done now, in this order.

    Attributes:
        admitted: requests that may run; each leaves by :meth:`ModelScheduler.leave`.
        unload: models to unload, whatever still runs.
        load: models to load.
    """

    admitted: list[Ticket] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)


class QueueFullError(Exception):
    """A request cannot wait; ``retry_after`` are the seconds that its model takes to load."""

    def __init__(self, cause: str, retry_after: float) -> None:
        super().__init__(cause)
        self.retry_after = retry_after


class ModelScheduler:
    """The queue and the states of all models. Times are a clock's seconds.

    After each call that changes something, :meth:`plan` returns what to do; its outcomes are
    reported by the methods ``on_...``.

    Attributes:
        models: by name, in their order.
        switches: how often a model was unloaded to load another one.
    """

    def __init__(self, models: Iterable[ScheduledModel], policy: SwitchPolicy) -> None:
        self.models = {model.name: model for model in models}
        self.policy = policy
        self.switches = 0
        self._queue: dict[int, Ticket] = {}
        self._numbers = itertools.count()
        self._blocked = False
        """Whether the oldest request waits for models to be evicted."""

    @property
    def queued(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def memory_taken(self) -> int:
        """Bytes of all models that are loaded, or are being loaded or unloaded."""
        return sum(self.memory_of(model) for model in self._present())

    def memory_of(self, model: ScheduledModel) -> int:
        """Bytes that are reserved for a model: one that needs more than all is loaded alone."""
        return min(model.memory, self.policy.budget)

    def queued_for(self, name: str) -> int:
        """Requests for a model in the queue."""
        return sum(ticket.model == name for ticket in self._queue.values())

    def load_wanted(self, name: str) -> bool:
        """Whether a ticket that only wants the model loaded is in the queue."""
        return any(t.model == name and not t.runs for t in self._queue.values())

    # ------------------------------------------------------------------ requests

    def arrive(self, name: str, now: float, *, runs: bool = True) -> Ticket:
        """Queue a request; :meth:`plan` admits it, at once if its model is loaded.

        Raises:
            QueueFullError: Too many wait, or it would have to wait for too long.
        """
        model = self.models[name]
        if model.state is not LoadState.LOADED:
            seconds = model.expected_load_seconds
            if len(self._queue) >= self.policy.queue_size:
                raise QueueFullError(f"{len(self._queue)} requests wait for a model", seconds)
            wait = self.expected_wait(name, now)
            if wait > self.policy.wait:
                raise QueueFullError(
                    f"the model {name} would be loaded in {wait:.0f} s, after those before it",
                    seconds,
                )
        ticket = Ticket(next(self._numbers), name, now, runs)
        self._queue[ticket.number] = ticket
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request that has not been admitted."""
        self._queue.pop(ticket.number, None)

    def leave(self, name: str, now: float) -> None:
        """A request that was admitted has ended."""
        model = self.models[name]
        model.running -= 1
        model.used_at = now

    def want_unload(self, name: str) -> None:
        """Unload a model when its running requests are done, or their time is up."""
        self.models[name].unload_wanted = True

    def expected_wait(self, name: str, now: float) -> float:
        """Seconds until a request that arrives now can run, if nothing fails.

        Models before it stay for their minimum time; drains count as if they took none.
        """
        waiting = [m for m in self._waiting_models() if m.name != name]
        waiting.append(self.models[name])
        seconds = 0.0
        free = self.policy.budget - self.memory_taken
        leaving = [self._stays_until(m) - now for m in self._loaded()]
        seconds_to_room = max(0.0, min(leaving, default=0.0))
        for index, model in enumerate(waiting):
            if model.state in (LoadState.LOADING, LoadState.LOADED):
                seconds += model.expected_load_seconds if model.state is LoadState.LOADING else 0.0
                continue
            need = self.memory_of(model)
            if free >= need:
                free -= need
            else:
                seconds += seconds_to_room if index == 0 else self._residence(waiting[index - 1])
            seconds += model.expected_load_seconds
        return seconds

    # ------------------------------------------------------------------ models

    def on_loaded(self, name: str, memory: int, seconds: float, now: float) -> None:
        """A model serves; ``memory`` was measured, the load took ``seconds``."""
        model = self.models[name]
        model.state, model.memory, model.load_seconds = LoadState.LOADED, memory, seconds
        model.loaded_at = model.used_at = now
        model.asleep = False

    def on_memory(self, name: str, memory: int) -> None:
        """A loaded model was measured again; its largest size counts."""
        model = self.models[name]
        model.memory = max(model.memory, memory)

    def on_load_failed(self, name: str) -> list[Ticket]:
        """A model could not be loaded, or has ended; returns its requests, which cannot run."""
        self.on_unloaded(name)
        failed = [ticket for ticket in self._queue.values() if ticket.model == name]
        for ticket in failed:
            del self._queue[ticket.number]
        return failed

    def on_unloaded(self, name: str) -> None:
        """A model's processes are gone."""
        model = self.models[name]
        model.state, model.drain_until, model.unload_wanted = LoadState.UNLOADED, math.inf, False

    # ------------------------------------------------------------------ decisions

    def plan(self, now: float) -> Plan:
        """Decide what happens next; states and the queue are changed accordingly."""
        plan = Plan()
        self._admit(plan, now)
        self._unload_unwanted(now)
        self._make_room(plan, now)
        for model in self.models.values():
            drained = model.running == 0 or now >= model.drain_until
            if model.state is LoadState.DRAINING and drained:
                model.state = LoadState.UNLOADING
                plan.unload.append(model.name)
        return plan

    def next_time(self, now: float) -> float:
        """The next time at which :meth:`plan` may decide something without another event."""
        times = [m.drain_until for m in self.models.values() if m.state is LoadState.DRAINING]
        for model in self._loaded():
            if self._blocked:
                times.append(self._stays_until(model))
            if model.idle_seconds > 0 and model.running == 0:
                times.append(model.used_at + model.idle_seconds)
        return min((time for time in times if time > now), default=math.inf)

    def _unload_unwanted(self, now: float) -> None:
        """Drain models that a client wants unloaded, that are idle, or that have grown."""
        for model in list(self._loaded()):
            idle = model.running == 0 and not self.queued_for(model.name)
            slept = model.idle_seconds > 0 and now >= model.used_at + model.idle_seconds
            if model.unload_wanted or (idle and slept):
                model.asleep = idle and slept and not model.unload_wanted
                self._drain(model, now)
        loaded = sorted(self._loaded(), key=self._rank)
        while self.memory_taken > self.policy.budget and len(loaded) > 1:
            if any(m.state in (LoadState.DRAINING, LoadState.UNLOADING) for m in self._present()):
                break  # which frees memory first
            self._drain(loaded.pop(0), now)

    def _make_room(self, plan: Plan, now: float) -> None:
        """Load models in the order of their oldest requests, while there is room."""
        self._blocked = False
        for model in self._waiting_models():
            if model.state is not LoadState.UNLOADED:
                continue
            if not self._fits(model, ()):
                self._displace(model, now)
                self._blocked = True
                return
            model.state = LoadState.LOADING
            plan.load.append(model.name)

    def _displace(self, model: ScheduledModel, now: float) -> None:
        """Drain the models to evict for this one, if they have been loaded long enough."""
        leaving = [
            m for m in self._present() if m.state in (LoadState.DRAINING, LoadState.UNLOADING)
        ]
        stayed = [m for m in self._loaded() if now >= self._stays_until(m)]
        victims: list[ScheduledModel] = []
        for victim in sorted(stayed, key=self._rank):
            if self._fits(model, [*leaving, *victims]):
                break
            victims.append(victim)
        if not self._fits(model, [*leaving, *victims]):
            return
        for victim in victims:
            self.switches += 1
            self._drain(victim, now)

    def _admit(self, plan: Plan, now: float) -> None:
        for ticket in list(self._queue.values()):
            model = self.models[ticket.model]
            if model.state is LoadState.LOADED:
                del self._queue[ticket.number]
                plan.admitted.append(ticket)
                model.used_at = now
                model.running += ticket.runs

    def _drain(self, model: ScheduledModel, now: float) -> None:
        model.state, model.drain_until = LoadState.DRAINING, now + self.policy.drain

    def _fits(self, model: ScheduledModel, without: Iterable[ScheduledModel]) -> bool:
        """Whether a model can be loaded beside those that are there, ``without`` some of them."""
        gone = {other.name for other in without}
        stay = [other for other in self._present() if other.name not in gone]
        taken = sum(map(self.memory_of, stay))
        few = not self.policy.most_loaded or len(stay) < self.policy.most_loaded
        return few and taken + self.memory_of(model) <= self.policy.budget

    def _present(self) -> Iterator[ScheduledModel]:
        return (model for model in self.models.values() if model.state.takes_memory)

    def _loaded(self) -> Iterator[ScheduledModel]:
        return (model for model in self.models.values() if model.state is LoadState.LOADED)

    def _waiting_models(self) -> list[ScheduledModel]:
        """The models of the queue in the order of their oldest requests."""
        names = dict.fromkeys(ticket.model for ticket in self._queue.values())
        return [self.models[name] for name in names]

    def _residence(self, model: ScheduledModel) -> float:
        return max(self.policy.residence, model.load_seconds or 0.0)

    def _stays_until(self, model: ScheduledModel) -> float:
        """When a loaded model may be unloaded for another."""
        return model.loaded_at + self._residence(model)

    @staticmethod
    def _rank(model: ScheduledModel) -> tuple[bool, float]:
        """Models without requests are evicted first, the least recently used before others."""
        return model.running > 0, model.used_at
