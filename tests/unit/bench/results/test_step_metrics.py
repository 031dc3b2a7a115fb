"""All metrics of a step."""

from __future__ import annotations

import pytest

from tests.unit.bench.results.simulation import Server, request
from tgi_cli.bench.events import BenchStep, ClientHealth, StepRecord
from tgi_cli.bench.plan import StepBounds, client_step, rate_step
from tgi_cli.bench.reports.markdown import load_table
from tgi_cli.bench.statistics.metrics import step_metrics
from tgi_cli.bench.text_output import line

STEP = BenchStep(kind="concurrency", value=2, label="2")


def record(*requests: object, **fields: object) -> StepRecord:
    about = {"began": 0.0, "duration": 10.0, **fields}
    return StepRecord(step=STEP, requests=list(requests), **about)  # type: ignore[arg-type]


def test_by_hand() -> None:
    metrics = step_metrics(
        record(
            request(0),
            request(1, arrivals=(1.0, 3.0), counts=(1, 3)),
            request(2, error="http 429"),
            request(3, error="http 429"),
            request(4, error="timeout"),
            request(5, warmup=True),
        ),
        {"ttft": 2000, "tpot": 1000},
    )
    assert (metrics.requests, metrics.succeeded, metrics.failed) == (5, 2, 3)
    assert metrics.errors == {"http 429": 2, "timeout": 1}
    assert (metrics.input_tokens, metrics.output_tokens) == (20, 7)
    assert metrics.rates["requests_per_second"] == pytest.approx(0.2)
    assert metrics.rates["output_tokens_per_second"] == pytest.approx(0.7)
    assert metrics.rates["total_tokens_per_second"] == pytest.approx(2.7)
    assert metrics.rates["goodput"] == pytest.approx(0.1), "the second alone has a TPOT below 1 s"
    assert metrics.attainment == pytest.approx(1 / 5)
    assert metrics.tokens_per_event == pytest.approx(7 / 5)
    assert metrics.concurrency == pytest.approx((4.5 + 3.5 + 3 * 4.5) / 10)
    assert metrics.latencies["ttft"].count == 2
    assert metrics.counted_by == {"usage": 2}


def test_without_limits_there_is_no_goodput() -> None:
    metrics = step_metrics(record(request(0)))
    assert metrics.attainment is None
    assert "goodput" not in metrics.rates


def test_the_rates_have_intervals_around_them() -> None:
    metrics = step_metrics(Server().answer(client_step(4, StepBounds(seconds=20))))
    for name, value in metrics.rates.items():
        low, high = metrics.rate_intervals[name]
        assert low < value < high
        assert high - low < value
    bare = step_metrics(Server().answer(client_step(4, StepBounds(seconds=20))), intervals=False)
    assert bare.rate_intervals == {}
    assert bare.rates == metrics.rates
    assert bare.latencies["itl"].intervals == {}


def test_as_many_are_in_flight_as_there_are_clients() -> None:
    metrics = step_metrics(Server(places=4).answer(client_step(8, StepBounds(seconds=40))))
    assert metrics.concurrency == pytest.approx(8, rel=0.05)


def test_a_queue_is_seen_by_who_was_due() -> None:
    server = Server(places=1)
    late = server.answer(rate_step(server.capacity * 2, StepBounds(requests=50)))
    metrics = step_metrics(late)
    assert metrics.latencies["ttft_scheduled"].p99 > 10 * server.prefill * 1000


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (record(request(0)), "1 requests: p95 and above are little more than the maximum"),
        (record(request(0, error="connect")), "every request failed: there are no latencies"),
        (
            record(*(request(n) for n in range(99)), request(99, error="connect")),
            "1 of 100 requests failed (1.0%)",
        ),
        (
            record(request(0), client=ClientHealth(behind=True, reason="it took all of a core")),
            "it took all of a core",
        ),
        (
            record(request(0, counted_by="events")),
            "the server reports no token counts: events are counted",
        ),
        (
            record(request(0, output_tokens=6)),
            "2.00 tokens per event: gaps are between events",
        ),
        (record(request(0), stopped="the user stopped it"), "the user stopped it"),
    ],
)
def test_it_warns(made: StepRecord, said: str) -> None:
    assert said in step_metrics(made).warnings


def test_nothing_at_all() -> None:
    metrics = step_metrics(record())
    assert (metrics.requests, metrics.rates, metrics.latencies) == (0, {}, {})
    assert metrics.runs == 0
    metrics = step_metrics(record(duration=0.0))
    assert metrics.concurrency == 0.0


def test_acceptance_is_the_share_of_the_servers_drafts_that_were_right() -> None:
    drafts = {"tgi_draft_tokens_total": 40.0, "tgi_draft_accepted_tokens_total": 30.0}
    metrics = step_metrics(record(request(0), server=drafts))
    assert metrics.acceptance == 0.75
    assert "75.0% of drafts accepted" in line(metrics)
    assert "Drafts accepted" in load_table([metrics])
    assert "75.0%" in load_table([metrics])


def test_acceptance_is_told_by_where_drafts_come_from() -> None:
    kinds = ("tgi_draft_tokens_by_source_total", "tgi_draft_accepted_tokens_by_source_total")
    counts = {"context": (30.0, 12.0), "weights": (10.0, 8.0), "recent": (0.0, 0.0)}
    drafts = {"tgi_draft_tokens_total": 40.0, "tgi_draft_accepted_tokens_total": 20.0}
    for source, values in counts.items():
        for kind, value in zip(kinds, values, strict=True):
            drafts[f"{kind}{{source={source}}}"] = value
    metrics = step_metrics(record(request(0), server=drafts))
    assert metrics.drafts == {"context": (30, 12), "weights": (10, 8)}
    assert [counts.share for counts in metrics.drafts.values()] == [0.4, 0.8]
    assert "50.0% of drafts accepted (context 40.0%, weights 80.0%)" in line(metrics)


@pytest.mark.parametrize("drafted", [None, 0.0])
def test_without_drafts_there_is_no_acceptance(drafted: float | None) -> None:
    server = {} if drafted is None else {"tgi_draft_tokens_total": drafted}
    metrics = step_metrics(record(request(0), server=server))
    assert metrics.acceptance is None
    assert "drafts" not in line(metrics)
    assert "Drafts" not in load_table([metrics])


def test_events_that_arrive_together_are_a_warning() -> None:
    drafted = request(0, arrivals=(1.0, 2.0, 2.0, 2.0, 3.0), counts=(1,) * 5)
    metrics = step_metrics(record(drafted, server={"tgi_draft_accepted_tokens_total": 2.0}))
    assert metrics.together == 0.5
    assert metrics.unresolved == {}, "the server's drafts arrive together"
    assert any(w.startswith("50% of the events arrived together") for w in metrics.warnings)
    steady = request(0, arrivals=(1.0, 2.0, 3.0), counts=(1, 1, 1))
    assert step_metrics(record(steady)).together == 0
    assert not any("together" in w for w in step_metrics(record(steady)).warnings)
    single = step_metrics(record(request(0, arrivals=(1.0,), counts=(1,))))
    assert single.together == 0
