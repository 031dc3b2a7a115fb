"""Latencies that the client or the network could not resolve are not given."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.bench.results.simulation import request
from tgi_cli.bench.compare import compare
from tgi_cli.bench.dashboard.metrics import panels
from tgi_cli.bench.dashboard.run_state import RunState
from tgi_cli.bench.events import (
    BenchRequestRecord,
    BenchRun,
    BenchStep,
    BenchTarget,
    ClientHealth,
    RequestDone,
    StepEnded,
    StepRecord,
    StepStarted,
)
from tgi_cli.bench.reports import comparison, html
from tgi_cli.bench.reports.markdown import load_table, markdown
from tgi_cli.bench.statistics.metrics import step_metrics
from tgi_cli.bench.text_output import line

STEP = BenchStep(kind="concurrency", value=2, label="2")
TOKENS = 200


def answered(index: int, step: float, burst: int = 1) -> BenchRequestRecord:
    """A request whose tokens are ``step`` seconds apart, read ``burst`` at a time."""
    began = 0.1 * index
    arrivals = tuple(began + 0.05 + step * (n // burst * burst) for n in range(TOKENS))
    return request(index, at=began, arrivals=arrivals)


def step_of(
    step: float = 0.002, burst: int = 1, server: dict[str, float] | None = None, **lag: float
) -> StepRecord:
    requests = [answered(index, step, burst) for index in range(30)]
    return StepRecord(
        step=STEP,
        began=0.0,
        duration=10.0,
        requests=requests,
        client=ClientHealth(**lag),
        server=server or {},
    )


def run_of(*steps: StepRecord) -> BenchRun:
    return BenchRun(
        created=0.0,
        command=[],
        tgi="0",
        machine={},
        target=BenchTarget(kind="tgi", address="http://127.0.0.1:3000", model="m"),
        workload={},
        steps=list(steps),
    )


def test_a_client_in_time_resolves_everything() -> None:
    metrics = step_metrics(step_of(lag_p50=0.0011, lag_p99=0.0015))
    assert metrics.unresolved == {}
    assert metrics.latencies["itl"].p50 == pytest.approx(2.0)
    assert not any("lag" in warning for warning in metrics.warnings)


def test_gaps_of_bursts_are_not_given() -> None:
    metrics = step_metrics(step_of(burst=20, lag_p99=0.025))
    assert list(metrics.unresolved) == ["itl"]
    assert "95% of the events arrived with the one before" in metrics.unresolved["itl"]
    assert "itl" not in metrics.latencies
    assert metrics.latencies["tpot"].p50 == pytest.approx(2.0, rel=0.1)
    assert any(warning.startswith("ITL is unresolved") for warning in metrics.warnings)


def test_bursts_of_drafts_are_the_servers() -> None:
    drafts = {"tgi_draft_accepted_tokens_total": 30 * TOKENS * 0.95}
    metrics = step_metrics(step_of(burst=20, server=drafts))
    assert metrics.unresolved == {}
    assert "TPOT 1.8/" in line(metrics)
    found = panels(step_of(burst=20, server=drafts)).decode
    assert (list(found.columns), found.unresolved, found.note) == (["E2E ms", "TPOT ms"], "", "")


def test_a_server_that_does_not_count_drafts_may_be_the_reason() -> None:
    reason = "the server drafts (speculation), or the client or the network was too slow"
    assert reason in step_metrics(step_of(burst=20)).unresolved["itl"]
    counted = {"tgi_draft_accepted_tokens_total": 0.0}
    assert reason not in step_metrics(step_of(burst=20, server=counted)).unresolved["itl"]


def test_drafts_are_known_while_a_step_runs() -> None:
    state = RunState()
    state.apply(StepStarted(0, 1, STEP))
    for index in range(30):
        state.apply(RequestDone(0, answered(index, 0.002, 20)))
    state.count_drafts(None)
    assert "itl" in step_metrics(state.steps[0].snapshot()).unresolved
    for _ in range(2):
        state.count_drafts(15 * TOKENS * 0.95)
    assert step_metrics(state.steps[0].snapshot()).unresolved == {}
    state.apply(StepEnded(0, step_of()))
    state.count_drafts(1.0)
    assert state.steps[0].snapshot().server == {}


def test_what_is_below_the_clients_lag_is_not_given() -> None:
    metrics = step_metrics(step_of(lag_p50=0.04, lag_p99=0.2))
    assert set(metrics.unresolved) == {"itl", "ttft", "ttft_scheduled"}
    assert {"tpot", "e2e"} <= set(metrics.latencies), "which are long enough"
    assert "lagged 40.0 ms" in metrics.unresolved["ttft"]


def test_a_tail_like_the_clients_lag_is_a_warning() -> None:
    metrics = step_metrics(step_of(lag_p50=0.0005, lag_p99=0.025))
    assert metrics.unresolved == {}
    assert any(
        warning.startswith("ITL p99: the load generator's own lag reached 25 ms")
        for warning in metrics.warnings
    )
    assert not any(warning.startswith("E2E") for warning in metrics.warnings)


def test_limits_that_cannot_be_checked_are_named() -> None:
    metrics = step_metrics(step_of(burst=20), {"itl": 5.0, "e2e": 1000.0})
    assert "the limit on ITL cannot be checked" in metrics.warnings


def test_every_output_marks_it() -> None:
    record = step_of(burst=20)
    metrics = step_metrics(record)
    assert "ITL unresolved" in line(metrics)
    assert " 0.0/" not in line(metrics)
    assert "| unresolved " in load_table([metrics])
    text = markdown(run_of(record))
    assert "ITL is unresolved: 95%" in text
    page = html(run_of(record, msgspec.structs.replace(record, step=STEP)))
    assert "unresolved: 95% of the events" in page
    assert "ITL: distribution" not in page
    found = panels(record).decode
    assert list(found.columns) == ["E2E ms", "TPOT ms"]
    assert found.note.startswith("ITL is unresolved, see TPOT")
    assert found.values.mean() == found.latency[0] == pytest.approx(1.81, rel=0.01)
    assert "TPOT: distribution" in page


def test_it_is_not_compared() -> None:
    found = compare(run_of(step_of()), run_of(step_of(burst=20)))
    assert "itl" not in {row.metric for row in found.rows}
    assert {"tpot", "ttft_scheduled", "e2e_scheduled"} <= {row.metric for row in found.rows}
    assert any(
        note.startswith("ITL of concurrency 2 is not compared: in the second run, 95%")
        for note in found.notes
    )
    assert "ITL of concurrency 2 is not compared" in comparison(found)


def test_a_median_of_zero_is_no_figure_of_the_table() -> None:
    drafts = {"tgi_draft_accepted_tokens_total": 30 * TOKENS * 0.95}
    metrics = step_metrics(step_of(burst=20, server=drafts))
    assert metrics.unresolved == {}, "the server's drafts arrive together"
    assert metrics.latencies["itl"].p50 == 0
    table = load_table([metrics])
    assert "| bursts " in table
    assert "| 0.0 ms " not in table
    assert "bursts" not in load_table([step_metrics(step_of())])


def test_latencies_of_zero_have_no_ratio() -> None:
    """As drafts that arrive together: the median of the gaps is 0, or may be."""
    drafts = {"tgi_draft_accepted_tokens_total": 30 * TOKENS * 0.55}
    found = compare(run_of(step_of()), run_of(step_of(burst=2, server=drafts)))
    rows = [row for row in found.rows if row.metric == "itl"]
    assert [row.statistic for row in rows] == ["p99"]
    text = comparison(found)
    assert all(len(cell) < 30 for row in text.splitlines() for cell in row.split("|")[2:])
