"""The plans against a server that is arithmetic."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.bench.results.simulation import Server, played
from tgi_cli.bench import plan
from tgi_cli.bench.events import BenchStep, StepRecord
from tgi_cli.bench.plan import StepBounds
from tgi_cli.bench.statistics.metrics import StepMetrics, find_knee, meets, step_metrics

BOUNDS = StepBounds(seconds=15, warmups=1)


def test_the_batch_sweep_is_tgi_s() -> None:
    found = plan.batches([1, 2, 4], runs=10, warmups=1)
    records, notes = played(found, Server().batch)
    assert found.total == 3
    assert [record.step for record in records] == [
        BenchStep(kind="batch", value=size, label=str(size), warmup=1, requests=11)
        for size in (1, 2, 4)
    ]
    assert [step_metrics(record).runs for record in records] == [10, 10, 10]
    assert notes == []


def test_clients_and_rates_have_their_bounds() -> None:
    bounds = StepBounds(requests=20, seconds=30, warmups=2)
    steps = [plan.client_step(8, bounds), plan.rate_step(2.5, bounds)]
    assert steps == [
        BenchStep(kind="concurrency", value=8, label="8", warmup=16, requests=36, seconds=30),
        BenchStep(kind="rate", value=2.5, label="2.5/s", warmup=2, requests=22, seconds=30),
    ]
    assert plan.clients([1, 2], bounds).total == plan.rates([1, 2], bounds).total == 2
    unbounded = plan.client_step(1, StepBounds(seconds=5))
    assert unbounded.requests is None


@pytest.mark.parametrize("places", [1, 4, 13])
def test_a_sweep_ends_at_saturation_and_finds_the_knee(places: int) -> None:
    server = Server(places=places)
    records, notes = played(plan.to_saturation(BOUNDS), server.answer)
    clients = sorted(int(record.step.value) for record in records)
    # As many clients as places keep all of them busy: more only wait.
    assert max(clients) <= 8 * places
    knee = int(notes[0].removeprefix("knee at ").split()[0])
    assert places * 0.9 <= knee <= places * 1.15
    assert "throughput at" in notes[0]


def test_a_sweep_without_saturation_is_noted() -> None:
    records, notes = played(plan.to_saturation(BOUNDS, most=8), Server(places=1000).answer)
    assert [record.step.value for record in records] == [1, 2, 4, 8]
    assert notes == ["saturation was not reached with 8 clients"]


def test_a_sweep_ends_when_nothing_is_answered() -> None:
    def refuse(step: BenchStep) -> StepRecord:
        record = Server().answer(step)
        if step.value < 4:
            return record
        failed = [msgspec.structs.replace(request, error="http 503") for request in record.requests]
        return msgspec.structs.replace(record, requests=failed)

    records, notes = played(plan.to_saturation(BOUNDS), refuse)
    assert [record.step.value for record in records] == [1, 2, 4]
    assert notes == ["no request was answered with 4 clients; the sweep ends there"]


def test_one_slow_step_is_no_saturation() -> None:
    """Chance: with 4 clients throughput fails to grow once."""

    def answer(step: BenchStep) -> StepRecord:
        slowed = 2.2 if step.value == 4 else 1.0
        return Server(places=32, slowed=slowed).answer(step)

    records, _ = played(plan.to_saturation(BOUNDS, refine=0), answer)
    assert max(record.step.value for record in records) >= 64


def test_the_knee_needs_latency_that_grows() -> None:
    def points(places: int, clients: list[int]) -> list[StepMetrics]:
        server = Server(places=places)
        steps = [plan.client_step(count, BOUNDS) for count in clients]
        return [step_metrics(server.answer(step), intervals=False) for step in steps]

    assert find_knee(points(4, [1, 2, 4, 8, 16])) == 2
    assert find_knee(points(64, [1, 2, 4, 8, 16])) is None
    assert find_knee(points(4, [8])) is None
    assert find_knee([]) is None


@pytest.mark.parametrize("places", [1, 8])
def test_the_peak_rate_within_limits(places: int) -> None:
    server = Server(places=places, spread=0.2)
    slo = {"ttft": 400.0}
    found = plan.peak_rate(slo, StepBounds(requests=600, warmups=5))
    records, notes = played(found, server.answer)
    assert [record.step.kind for record in records[:2]] == ["concurrency", "rate"]
    rates = {
        record.step.value: meets(step_metrics(record, slo, intervals=False))
        for record in records[1:]
    }
    met = max(rate for rate, passed in rates.items() if passed)
    missed = min(rate for rate, passed in rates.items() if not passed)
    assert met < missed <= met * 1.1 * 1.001
    assert 0.3 * server.capacity < met < server.capacity
    assert notes[0].startswith(f"peak rate within the limits: {met:.4g}/s with ")
    assert notes[0].endswith(f"{missed:.4g}/s missed them")
    assert len(records) <= 16


def test_limits_that_one_client_misses_end_the_search() -> None:
    records, notes = played(plan.peak_rate({"ttft": 10.0}, BOUNDS), Server().answer)
    assert len(records) == 1
    assert notes[0].startswith("the limits are missed by one client alone, so by every rate: ttft ")
    assert notes[0].endswith("(p90; limit 10)")


def test_a_search_that_begins_too_high_goes_down() -> None:
    server = Server(places=2)
    found = plan.peak_rate({"ttft": 300.0}, StepBounds(requests=300), first=server.capacity * 6)
    records, notes = played(found, server.answer)
    rates = [record.step.value for record in records[1:]]
    assert rates[1] == rates[0] / 2
    assert notes[0].startswith("peak rate within the limits")


def test_a_search_has_an_end_even_without_a_limit() -> None:
    records, notes = played(
        plan.peak_rate({"ttft": 1e9}, StepBounds(requests=10), most=6), Server().answer
    )
    assert len(records) == 6
    assert notes[0].endswith("no higher rate was tried, and none was missed")
