"""What the statistics of steps add up to."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tgi_cli.engine.distribution import Distribution
from tgi_cli.engine.metrics import EngineCounters, EngineMetrics
from tgi_cli.engine.step_stats import StepStatistics, StepTimes
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc import metrics_codec


def _step(iteration: int, context_tokens: int, **more: Any) -> StepStatistics:
    others = ("timestamp", "joined")
    names = [name for name in StepStatistics._fields if name not in others]
    counts: dict[str, Any] = dict.fromkeys(names, 0) | {
        "iteration": iteration,
        "context_tokens": context_tokens,
    }
    return StepStatistics(timestamp=0.0, **(counts | more))


def test_steps_are_summed_and_the_engines_own_sums_are_kept() -> None:
    tally = EngineMetrics()
    assert tally.now == EngineCounters()
    tally(_step(1, 30, reused_tokens=16, prompt_tokens=46, cached_blocks=2))
    before = tally.now
    tally(_step(2, 5, reused_tokens=32, prompt_tokens=67, cached_blocks=1))
    assert tally.now == EngineCounters(
        reused_tokens=32, prompt_tokens=67, cached_blocks=1, steps=2, context_tokens=35
    )
    assert before.context_tokens == 30, "who read it keeps what he read"


def _times(prefill: bool, failed: bool = False, seconds: float = 0.25) -> StepTimes:
    return StepTimes(
        prefill=prefill,
        joined=prefill,
        failed=failed,
        schedule=seconds,
        forward=2 * seconds,
        update=0.0,
        send=0.0,
    )


def test_steps_are_counted_by_what_they_do() -> None:
    tally = EngineMetrics()
    tally(_step(1, 30, new_requests=2, scheduled_requests=2))
    tally(_step(2, 8, new_requests=1, generation_requests=2, joined="chunking"))
    tally(_step(3, 0, generation_requests=3))
    tally.timed(_times(True))
    tally.timed(_times(True))
    tally.timed(_times(False, failed=True))
    assert tally.launched == {"prefill": 2, "decode": 1}
    assert tally.failed == {"prefill": 0, "decode": 1}
    assert tally.joined == {"backpressure": 0, "wait_exceeded": 0, "chunking": 1}
    assert (tally.sizes.counts[:3], tally.sizes.sum) == ([1, 1, 0], 3)
    assert (tally.accepted.counts[0], tally.accepted.sum) == (5, 0)
    assert tally.seconds["total", "prefill"].sum == 1.5
    assert tally.seconds["forward", "prefill"].sum == 1.0
    assert sum(tally.seconds["total", "decode"].counts) == 0, "a failed step has no time"
    assert sum(tally.seconds["schedule", "join"].counts) == 2


def test_the_queues_age_grows_until_nobody_waits() -> None:
    tally = EngineMetrics()
    assert metrics_codec.statistics_of(tally, 1).queue_age == 0
    tally(_step(1, 1, oldest_ns=time.monotonic_ns() - 5_000_000_000))
    first = metrics_codec.statistics_of(tally, 1).queue_age
    assert 5 <= first < 60
    assert metrics_codec.statistics_of(tally, 1).queue_age > first
    assert metrics_codec.statistics_of(tally, 0).queue_age == 0


def test_statistics_survive_the_wire() -> None:
    tally = EngineMetrics()
    tally(_step(1, 30, new_requests=2))
    tally.timed(_times(True))
    sent = metrics_codec.statistics_of(tally, 0)
    message = metrics_codec.encode(sent, pb.StepMessage(queued=3))
    got = metrics_codec.decode(pb.StatisticsResponse.FromString(message.SerializeToString()))
    assert got.counts == sent.counts
    assert got.distributions.keys() == sent.distributions.keys()
    for key, found in sent.distributions.items():
        other = got.distributions[key]
        assert (other.bounds, other.counts, other.sum) == (found.bounds, found.counts, found.sum)


@given(st.lists(st.floats(-1, 10)))
def test_a_distribution_counts_as_prometheus_does(values: list[float]) -> None:
    bounds = (0.5, 1.0, 4.0)
    found = Distribution(bounds)
    for value in values:
        found.observe(value)
    for place, bound in enumerate(bounds):
        assert sum(found.counts[: place + 1]) == sum(value <= bound for value in values)
    assert sum(found.counts) == len(values)
