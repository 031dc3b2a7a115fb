"""What the scheduler of models promises, for any arrivals; and its rules, one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.multi_model.simulation import Arrival, Simulation, first_come_loads
from tgi_cli.multi_model.model_scheduler import (
    LoadState,
    ModelScheduler,
    QueueFullError,
    ScheduledModel,
    SwitchPolicy,
)

GB = 1 << 30
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        time=st.floats(0, 200),
        model=st.sampled_from("abcd"),
        seconds=st.floats(0.1, 30),
    ),
    max_size=40,
).map(lambda arrivals: sorted(arrivals, key=lambda each: each.time))
SIZES = st.fixed_dictionaries({name: st.integers(1, 12) for name in "abcd"})


def policy(**changes: object) -> SwitchPolicy:
    values: dict[str, object] = {"budget": 10, "queue_size": 1000, "wait": math.inf}
    return SwitchPolicy(**values | changes)  # type: ignore[arg-type]


@given(arrivals=ARRIVALS, memory=SIZES, residence=st.floats(0, 20), most=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_every_request_is_served_within_the_memory(
    arrivals: list[Arrival], memory: dict[str, int], residence: float, most: int
) -> None:
    simulation = Simulation(memory, policy(residence=residence, most_loaded=most))
    simulation.run(arrivals)
    assert sorted(simulation.served) == list(range(len(arrivals)))
    assert not simulation.cut, "all ended within the time for draining"
    assert not simulation.scheduler.queued


@given(arrivals=ARRIVALS, residence=st.floats(0, 20), drain=st.floats(0, 40))
@settings(max_examples=150, deadline=None)
def test_no_more_switches_than_first_come_first_served(
    arrivals: list[Arrival], residence: float, drain: float
) -> None:
    """Where one of them fits."""
    simulation = Simulation(dict.fromkeys("abcd", 10), policy(residence=residence, drain=drain))
    simulation.run(arrivals)
    assert len(simulation.loads) <= first_come_loads([each.model for each in arrivals])
    ended = [*simulation.served, *simulation.cut]
    assert sorted(ended) == list(range(len(arrivals))), "none is lost, if some are cut"


@given(arrivals=ARRIVALS, memory=SIZES, failing=st.sets(st.integers(1, 12)))
@settings(max_examples=100, deadline=None)
def test_failed_loads_end_their_own_requests_only(
    arrivals: list[Arrival], memory: dict[str, int], failing: set[int]
) -> None:
    simulation = Simulation(memory, policy(), failures=lambda _, load: load in failing)
    simulation.run(arrivals)
    assert sorted(simulation.served + simulation.failed) == list(range(len(arrivals)))


@given(arrivals=ARRIVALS, memory=SIZES)
@settings(max_examples=60, deadline=None)
def test_idle_models_are_unloaded(arrivals: list[Arrival], memory: dict[str, int]) -> None:
    simulation = Simulation(memory, policy(), idle_seconds=3.0)
    simulation.run(arrivals)
    assert sorted(simulation.served) == list(range(len(arrivals)))
    for model in simulation.scheduler.models.values():
        assert model.state is LoadState.UNLOADED
        assert not model.asleep or model.name in simulation.loads


def scheduler(*sizes: int, **changes: object) -> ModelScheduler:
    models = [
        ScheduledModel(name=name, memory=size) for name, size in zip("abcd", sizes, strict=False)
    ]
    return ModelScheduler(models, policy(**changes))


def load(tested: ModelScheduler, name: str, now: float, seconds: float = 1.0) -> None:
    """Load a model for a request, which ends at once."""
    tested.arrive(name, now)
    assert tested.plan(now).load == [name]
    tested.on_loaded(name, tested.models[name].memory, seconds, now)
    assert [ticket.model for ticket in tested.plan(now).admitted] == [name]
    tested.leave(name, now)


def test_models_that_fit_together_stay() -> None:
    tested = scheduler(4, 6)
    load(tested, "a", 0.0)
    load(tested, "b", 0.0)
    assert tested.memory_taken == 10
    for name in "abab":
        tested.arrive(name, 1.0)
        assert len(tested.plan(1.0).admitted) == 1
        tested.leave(name, 1.0)
    assert tested.switches == 0


def test_a_model_stays_for_its_minimum_time_and_newcomers_are_admitted_meanwhile() -> None:
    tested = scheduler(10, 10, residence=10.0)
    load(tested, "a", 0.0)
    tested.arrive("b", 1.0)
    assert not tested.plan(1.0).unload
    assert tested.next_time(1.0) == 10.0
    tested.arrive("a", 5.0)
    assert len(tested.plan(5.0).admitted) == 1
    plan = tested.plan(10.0)
    assert not plan.unload, "a request is running"
    assert tested.models["a"].state is LoadState.DRAINING
    tested.arrive("a", 11.0)
    assert not tested.plan(11.0).admitted, "behind the one for b"
    tested.leave("a", 12.0)
    assert tested.plan(12.0).unload == ["a"]
    tested.on_unloaded("a")
    assert tested.plan(13.0).load == ["b"]
    assert tested.switches == 1


def test_a_model_that_loads_slowly_stays_for_as_long() -> None:
    tested = scheduler(10, 10, residence=10.0)
    load(tested, "a", 0.0, seconds=60.0)
    tested.arrive("b", 1.0)
    tested.plan(1.0)
    assert tested.next_time(1.0) == 60.0


def test_a_drain_ends_in_time() -> None:
    tested = scheduler(10, 10, residence=0.0, drain=30.0)
    load(tested, "a", 0.0)
    tested.arrive("a", 0.0)
    tested.plan(0.0)
    tested.arrive("b", 5.0)
    assert not tested.plan(5.0).unload
    assert tested.next_time(5.0) == 35.0
    assert tested.plan(35.0).unload == ["a"]


def test_the_least_recently_used_makes_room() -> None:
    tested = scheduler(3, 3, 4, 5, residence=0.0)
    for now, name in enumerate("abc"):
        load(tested, name, float(now))
    tested.arrive("a", 4.0)
    tested.plan(4.0)
    tested.arrive("d", 5.0)
    assert tested.plan(5.0).unload == ["b", "c"], "a is in use"


def test_the_oldest_is_not_overtaken_in_memory() -> None:
    tested = scheduler(8, 9, 2, residence=10.0)
    load(tested, "a", 0.0)
    tested.arrive("b", 1.0)
    tested.arrive("c", 2.0)
    assert not tested.plan(2.0).load, "c would fit, and keep b waiting"


def test_a_model_larger_than_the_budget_is_loaded_alone() -> None:
    tested = scheduler(4, 50)
    load(tested, "a", 0.0)
    tested.arrive("b", 20.0)
    assert tested.plan(20.0).unload == ["a"]
    tested.on_unloaded("a")
    assert tested.plan(21.0).load == ["b"]
    assert tested.memory_taken == 10


def test_a_model_that_has_grown_displaces_the_least_recently_used() -> None:
    tested = scheduler(4, 6)
    load(tested, "a", 0.0)
    load(tested, "b", 1.0)
    tested.on_memory("b", 8)
    tested.on_memory("b", 7)
    assert tested.models["b"].memory == 8, "its peak counts"
    assert tested.plan(2.0).unload == ["a"]


def test_a_full_queue_and_a_long_wait_are_refused_with_the_time_of_a_load() -> None:
    tested = scheduler(10, 10, 10, residence=10.0, queue_size=2, wait=40.0)
    load(tested, "a", 0.0, seconds=20.0)
    tested.models["b"].load_seconds = 20.0
    tested.models["c"].load_seconds = 7.0
    tested.arrive("b", 0.0)
    tested.plan(0.0)
    with pytest.raises(QueueFullError, match="would be loaded in") as refused:
        tested.arrive("c", 0.0)
    assert refused.value.retry_after == 7.0
    tested.arrive("b", 0.0)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        tested.arrive("b", 0.0)
    tested.arrive("a", 0.0)
    assert len(tested.plan(0.0).admitted) == 1, "its model is loaded"


def test_cancelled_requests_load_nothing() -> None:
    tested = scheduler(10, 10, residence=0.0)
    load(tested, "a", 0.0)
    ticket = tested.arrive("b", 1.0)
    tested.cancel(ticket)
    assert not tested.plan(1.0).unload
    assert tested.models["a"].state is LoadState.LOADED


def test_loads_and_unloads_on_request() -> None:
    tested = scheduler(4, 4)
    tested.arrive("a", 0.0, runs=False)
    assert tested.plan(0.0).load == ["a"]
    tested.on_loaded("a", 4, 1.0, 1.0)
    tested.plan(1.0)
    assert tested.models["a"].running == 0
    tested.want_unload("a")
    assert tested.plan(1.0).unload == ["a"]
    tested.on_unloaded("a")
    assert not tested.models["a"].asleep
    assert tested.plan(2.0).load == []
