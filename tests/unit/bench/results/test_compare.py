"""The verdict on two runs: of the same server again, and of one that is slower."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from tests.unit.bench.results.simulation import Server, request, saved
from tgi_cli.bench import plan
from tgi_cli.bench.compare import Comparison, compare, differences
from tgi_cli.bench.events import BenchRun, BenchStep, ClientHealth, StepRecord
from tgi_cli.bench.plan import StepBounds

BOUNDS = StepBounds(seconds=25)


def load(server: Server, clients: tuple[int, ...] = (1, 4, 16)) -> BenchRun:
    return saved([server.answer(plan.client_step(count, BOUNDS)) for count in clients])


def batch(server: Server) -> BenchRun:
    return saved([server.batch(plan.batch_step(size, 10, 1)) for size in (1, 2, 4, 8)])


def verdicts(result: Comparison, metric: str, statistic: str | None = None) -> set[str]:
    return {
        row.verdict
        for row in result.rows
        if row.metric == metric and statistic in (None, row.statistic)
    }


@pytest.mark.parametrize("make", [load, batch])
@pytest.mark.parametrize("seed", range(1, 6))
def test_the_same_server_again_is_no_regression(make: object, seed: int) -> None:
    first = make(Server(spread=0.3))  # type: ignore[operator]
    second = make(Server(spread=0.3, seed=seed))  # type: ignore[operator]
    result = compare(first, second)
    assert result.rows
    assert result.regressions == []
    assert result.notes == []


@pytest.mark.parametrize("make", [load, batch])
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_server_slowed_by_a_tenth_is_called(make: object, seed: int) -> None:
    first = make(Server(spread=0.04))  # type: ignore[operator]
    second = make(Server(spread=0.04, slowed=1.1, seed=seed))  # type: ignore[operator]
    result = compare(first, second)
    worse = {row.metric for row in result.regressions}
    if make is batch:
        assert worse >= {"prefill", "decode_token", "decode_throughput"}
    else:
        assert worse >= {"tpot", "e2e_scheduled", "itl"}
        assert verdicts(result, "tpot") == {"worse"}
    assert {row.verdict for row in result.rows} <= {"worse", "same"}


def test_the_other_way_round_it_is_better() -> None:
    result = compare(load(Server(slowed=1.1)), load(Server()))
    assert result.regressions == []
    assert verdicts(result, "tpot") == {"better"}
    assert verdicts(result, "output_tokens_per_second") <= {"better", "same"}


def test_a_run_is_the_same_as_itself() -> None:
    run = load(Server())
    for row in compare(run, run).rows:
        assert row.ratio == 1.0
        assert row.verdict == "same"


def test_a_small_change_is_a_regression_only_with_a_small_threshold() -> None:
    first, second = load(Server(spread=0.01)), load(Server(spread=0.01, slowed=1.03, seed=1))
    assert compare(first, second).regressions == []
    assert compare(first, second, fail_on=0.02).regressions
    never = compare(first, load(Server(slowed=2)), fail_on=None)
    assert verdicts(never, "tpot") == {"worse"}
    assert never.regressions == []


def test_requests_that_fail_are_a_regression() -> None:
    first = load(Server())
    broken = [
        msgspec.structs.replace(
            record,
            requests=[
                msgspec.structs.replace(made, error="http 500") if made.index % 20 == 7 else made
                for made in record.requests
            ],
        )
        for record in first.steps
    ]
    result = compare(first, saved(broken))
    failed = [row for row in result.rows if row.metric == "answered" and row.failed]
    assert failed
    assert failed[-1].b == pytest.approx(0.95, abs=0.02)


def test_failures_of_all_requests_are_compared() -> None:
    first = load(Server(), (1,))
    dead = [
        msgspec.structs.replace(
            first.steps[0],
            requests=[
                msgspec.structs.replace(made, error="connect") for made in first.steps[0].requests
            ],
        )
    ]
    result = compare(first, saved(dead))
    assert {row.metric for row in result.regressions} >= {"answered", "requests_per_second"}


def test_rates_within_limits_are_compared_where_there_are_limits() -> None:
    server = Server()
    run = load(server)
    limited = msgspec.structs.replace(run, slo={"ttft": 60.0})
    result = compare(limited, msgspec.structs.replace(load(Server(slowed=1.3)), slo={"ttft": 60.0}))
    assert "worse" in verdicts(result, "goodput")
    assert verdicts(compare(run, run), "goodput") == set()


def test_steps_match_by_kind_and_value() -> None:
    result = compare(load(Server(), (1, 4)), load(Server(), (4, 8)))
    assert {row.step for row in result.rows} == {"concurrency 4"}
    assert result.unmatched == [
        "concurrency 1: only in the first run",
        "concurrency 8: only in the second run",
    ]


def test_a_step_that_comes_twice_is_taken_together() -> None:
    run = load(Server(), (4,))
    twice = saved([*run.steps, *load(Server(seed=1), (4,)).steps])
    (row,) = [row for row in compare(run, twice).rows if row.metric == "requests_per_second"]
    assert row.ratio == pytest.approx(1.0, abs=0.05)


def test_a_tail_needs_values_beyond_it() -> None:
    few = StepRecord(
        step=BenchStep(kind="concurrency", value=1, label="1"),
        began=0.0,
        duration=100.0,
        requests=[
            request(n, at=float(n), arrivals=(n + 0.5, n + 0.6), counts=(1, 1)) for n in range(100)
        ],
    )
    statistics = {(row.metric, row.statistic) for row in compare(saved([few]), saved([few])).rows}
    assert ("ttft_scheduled", "p50") in statistics
    assert ("ttft_scheduled", "p99") not in statistics
    many = msgspec.structs.replace(few, requests=few.requests * 5)
    statistics = {(row.metric, row.statistic) for row in compare(saved([many]), saved([many])).rows}
    assert ("ttft_scheduled", "p99") in statistics


def test_gaps_between_events_of_several_tokens_are_not_compared() -> None:
    first = load(Server(), (1,))
    merged = [
        msgspec.structs.replace(
            made, arrivals=[made.arrivals[0], *made.arrivals[1::2]], counts=made.counts[:11]
        )
        for made in first.steps[0].requests
    ]
    second = saved([msgspec.structs.replace(first.steps[0], requests=merged)])
    result = compare(first, second)
    assert verdicts(result, "itl") == set()
    assert verdicts(result, "tpot") == {"same"}
    assert result.notes == ["events of the second run have several tokens: ITL is not compared"]


def test_differences_of_the_runs_are_noted() -> None:
    first = load(Server(), (1,))
    second = saved(
        [dataclasses.replace(Server()).answer(plan.client_step(1, BOUNDS))],
        machine={"processor": "another", "cores": 2},
        workload={"load": "concurrency", "seed": 1},
    )
    slow = msgspec.structs.replace(second.steps[0], client=ClientHealth(behind=True))
    second = msgspec.structs.replace(second, steps=[slow])
    assert differences(first, second) == [
        "the workload differs: seed 0 and 1",
        "the machine differs: processor 'a processor' and 'another'",
        "the load generator was the bottleneck in a step of the second run",
    ]
