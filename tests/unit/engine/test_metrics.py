"""What the engine's measurements add up to, and that they survive the wire."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_cli.engine.messages import StepOutputs, VerifiedDrafts
from tgi_cli.engine.metrics import (
    DRAFT_SOURCES,
    EngineLoad,
    EngineMetrics,
    Histogram,
    StageTimer,
)
from tgi_cli.engine.step import NewRow, Step, TokenAppend
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.sampling.params import SamplingParams

NEW_ROW = NewRow(0, 1, [1], 1, [0], SamplingParams())
PREFILL = Step(1, new=[NEW_ROW] * 2, rows=[0, 1], counts=[20, 10])
MIXED = Step(2, new=[NEW_ROW], rows=[0, 1, 2], counts=[1, 1, 8], num_decodes=2)
DECODE = Step(3, rows=[0, 1, 2], counts=[1, 1, 1], num_decodes=3)


def test_steps_are_counted_by_what_they_do() -> None:
    metrics = EngineMetrics()
    metrics.step_launched(PREFILL, "", 0)
    metrics.step_launched(MIXED, "chunking", 0)
    metrics.step_launched(DECODE, "", 0)
    assert metrics.counts["launched", "prefill"] == 2
    assert metrics.counts["launched", "decode"] == 1
    joined = {label: count for (name, label), count in metrics.counts.items() if name == "joined"}
    assert joined == {"backpressure": 0, "wait_exceeded": 0, "chunking": 1}
    sizes = metrics.histograms["next_size", ""]
    assert (sizes.counts[:3], sizes.sum) == ([1, 1, 0], 3)


def outputs_of(*tokens: int) -> StepOutputs:
    """The outputs of a step that gave so many tokens to requests 1, 2, ..."""
    ids = [request for request, count in enumerate(tokens, 1) for _ in range(count)]
    return StepOutputs(request_ids=ids, token_ids=ids, logprobs=[0.0] * len(ids))


def test_each_request_and_step_counts_its_tokens_beyond_the_first() -> None:
    metrics = EngineMetrics()
    metrics.step_updated(outputs_of(1, 1, 1))
    metrics.step_updated(outputs_of(4, 1, 2))
    metrics.step_updated(StepOutputs())
    skipped = metrics.histograms["skipped_tokens", ""]
    assert skipped.counts[:5] == [4, 1, 0, 1, 0]
    assert (sum(skipped.counts), skipped.sum) == (6, 4)


def test_accepted_drafts_are_counted_where_any_were_verified() -> None:
    metrics = EngineMetrics()
    outputs = outputs_of(4, 1, 1)
    outputs.drafts = [VerifiedDrafts(1, 5, 3), VerifiedDrafts(2, 2, 0)]
    metrics.step_updated(outputs)
    accepted = metrics.histograms["accepted_drafts", ""]
    assert accepted.counts[:5] == [1, 0, 0, 1, 0]
    assert (sum(accepted.counts), accepted.sum) == (2, 3)


def test_steps_with_drafts_are_decodes() -> None:
    metrics = EngineMetrics()
    drafts = [TokenAppend(1, 9, [5, 6, 7])]
    step = Step(1, rows=[0, 1], counts=[1, 4], samples=[1, 4], drafts=drafts, num_decodes=2)
    metrics.step_launched(step, "", 0)
    assert (metrics.counts["launched", "decode"], metrics.counts["launched", "prefill"]) == (1, 0)
    assert step.num_prefill_tokens == 0


def test_a_steps_stages_are_timed_and_a_failed_step_has_no_durations() -> None:
    metrics = EngineMetrics()
    timer = StageTimer(metrics)
    timer.launch(PREFILL, time.perf_counter() - 0.25)
    timer.arrive()
    timer.update()
    timer.end()
    timer.launch(DECODE, time.perf_counter())
    timer.fail()
    histograms = metrics.histograms
    assert 0.25 <= histograms["schedule", "prefill"].sum < 5
    assert histograms["schedule", "join"].sum == histograms["schedule", "prefill"].sum
    parts = ("schedule", "forward", "update", "send")
    total = sum(histograms[stage, "prefill"].sum for stage in parts)
    assert histograms["total", "prefill"].sum == pytest.approx(total)
    assert sum(histograms["total", "decode"].counts) == 0
    assert metrics.counts["failed", "decode"] == 1


def test_the_duration_of_a_step_is_what_streams_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the next one in flight, that is the time since the one before it ended."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = StageTimer(EngineMetrics())

    def launch(scheduling: float) -> None:
        now[0] += scheduling
        timer.launch(DECODE, now[0] - scheduling)

    def collect(seconds: float) -> float:
        now[0] += seconds
        timer.arrive()
        timer.update()
        return timer.end()

    launch(1.0)
    assert collect(10.0) == 11.0, "nothing was in flight"
    launch(1.0)
    launch(1.0)
    assert [collect(10.0), collect(10.0)] == [12.0, 10.0]
    now[0] += 5.0
    launch(1.0)
    assert collect(10.0) == 11.0, "idle before"


def test_the_queues_age_grows_while_requests_wait() -> None:
    metrics = EngineMetrics()
    assert metrics.queue_seconds == 0
    metrics.step_launched(DECODE, "", time.monotonic_ns() - 5_000_000_000)
    assert metrics.queue_seconds == 0
    metrics.load = EngineLoad(queued=1)
    first = metrics.queue_seconds
    assert 5 <= first < 60
    assert metrics.queue_seconds > first
    metrics.step_launched(DECODE, "", 0)
    assert metrics.queue_seconds == 0


@given(
    st.builds(EngineLoad, *[st.integers(0, 2**64 - 1)] * len(EngineLoad.__dataclass_fields__)),
    st.booleans(),
)
def test_metrics_survive_the_wire(load: EngineLoad, waiting: bool) -> None:
    sent = EngineMetrics(load)
    oldest_ns = time.monotonic_ns() - 3_000_000_000 if waiting else 0
    sent.step_launched(PREFILL, "backpressure", oldest_ns)
    sent.histograms["forward", "prefill"].observe(0.5)
    sent.histograms["accepted_drafts", ""].observe(3, 2)
    data = codec.encode_metrics(sent).SerializeToString()
    got = codec.decode_metrics(pb.MetricsResponse.FromString(data))
    assert got.load == load
    assert got.counts == sent.counts
    assert got.queue_seconds == pytest.approx(sent.queue_seconds, abs=2)
    assert got.histograms.keys() == sent.histograms.keys()
    for key, expected in sent.histograms.items():
        found = got.histograms[key]
        assert found.bounds == expected.bounds
        assert (found.counts, found.sum) == (expected.counts, expected.sum)


@given(st.lists(st.floats(-1, 10)))
def test_a_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    bounds = (0.5, 1.0, 4.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    for index, bound in enumerate(bounds):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)
    assert sum(histogram.counts) == len(values)


def test_drafts_are_counted_by_where_they_come_from() -> None:
    metrics = EngineMetrics()
    outputs = outputs_of(4, 1, 1)
    outputs.drafts = [VerifiedDrafts(1, 5, 3, "weights"), VerifiedDrafts(2, 2, 0, "context")]
    for _ in range(2):
        metrics.step_updated(outputs)
    names = ("drafted", "accepted")
    found = {key: count for key, count in metrics.counts.items() if key[0] in names}
    assert {key: count for key, count in found.items() if count} == {
        ("drafted", "weights"): 10,
        ("accepted", "weights"): 6,
        ("drafted", "context"): 4,
    }
    assert {source for _, source in found} == set(DRAFT_SOURCES)


def test_replicas_add_up_except_for_the_folder_that_they_share() -> None:
    parts = [
        EngineMetrics(EngineLoad(running=running, stored_bytes=stored))
        for running, stored in ((1, 100), (2, 130))
    ]
    parts[0].counts["launched", "decode"] = 3
    parts[1].counts["launched", "decode"] = 4
    parts[1].counts["stored", "hit"] = 5
    found = EngineMetrics.total(parts)
    assert (found.load.running, found.load.stored_bytes) == (3, 130)
    assert found.counts["launched", "decode"] == 7
    assert found.counts["stored", "hit"] == 5
