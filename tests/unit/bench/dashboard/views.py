"""The screens that are compared with what they were."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec

from tests.unit.bench.dashboard.cells import cells
from tests.unit.bench.dashboard.driven import saved
from tests.unit.bench.dashboard.script import batch_run, http_run, http_step, step_events
from tgi_cli.bench.compare import ComparedMetric, Comparison
from tgi_cli.bench.dashboard.app import BenchApp
from tgi_cli.bench.dashboard.poller import ServerPoller
from tgi_cli.bench.dashboard.run_state import RunState, ScreenTitle
from tgi_cli.bench.dashboard.views import VIEWS, ScreenOptions
from tgi_cli.bench.dashboard.views.compare import CompareView
from tgi_cli.bench.statistics.metrics import step_metrics
from tgi_cli.bench.statistics.summary import Summary

SIZES = ((80, 24), (140, 45))


def server(drafts: bool = False) -> ServerPoller:
    """A server whose metrics rise and fall, and that has been asked for a minute."""
    now = 0

    def answer(request: httpx.Request) -> httpx.Response:
        wave = abs(now % 40 - 20)
        return httpx.Response(
            200,
            text=f"tgi_queue_size {max(wave - 12, 0)}\n"
            f"tgi_batch_current_size {wave}\n"
            f"tgi_kv_cache_usage_ratio {wave / 25}\n"
            f"tgi_prefix_cache_query_tokens_total {now * 64}\n"
            f"tgi_prefix_cache_hit_tokens_total {now * 40}\n"
            f"tgi_request_time_to_first_token_seconds_count {now}\n"
            f"tgi_request_inter_token_seconds_count {now * now * 3}\n"
            f"tgi_engine_prompt_tokens_total {now * 640}\n"
            f"tgi_draft_tokens_total {now * 40 * drafts}\n"
            f"tgi_draft_accepted_tokens_total {now * 30 * drafts}\n"
            f'tgi_draft_tokens_by_source_total{{source="context"}} {now * 30 * drafts}\n'
            f'tgi_draft_accepted_tokens_by_source_total{{source="context"}} {now * 27 * drafts}\n'
            f'tgi_draft_tokens_by_source_total{{source="weights"}} {now * 10 * drafts}\n'
            f'tgi_draft_accepted_tokens_by_source_total{{source="weights"}} {now * 3 * drafts}\n',
        )

    def clock() -> float:
        nonlocal now
        now += 1
        return float(now)

    return ServerPoller("http://127.0.0.1:3000", transport=httpx.MockTransport(answer), clock=clock)


def steady(app: BenchApp) -> None:
    """Intervals that no other version of a random generator changes."""
    for step in app.run_state:
        metrics = step_metrics(step.snapshot(), app.metrics.slo, intervals=False)
        if step.record is not None:
            metrics = msgspec.structs.replace(
                metrics,
                latencies={name: _sure(found) for name, found in metrics.latencies.items()},
                batches={name: _sure(found) for name, found in metrics.batches.items()},
                rate_intervals={
                    name: (rate * 0.9, rate * 1.1) for name, rate in metrics.rates.items()
                },
            )
        app.metrics._tables[step] = (step.version, metrics)


def _sure(found: Summary) -> Summary:
    names = ("mean", "p50", "p90", "p95", "p99", "p999")
    around = {name: (getattr(found, name) * 0.95, getattr(found, name) * 1.05) for name in names}
    return msgspec.structs.replace(found, intervals=around)


def compared() -> Comparison:
    """One written down."""
    rows = [
        ComparedMetric(
            step=f"concurrency {clients}",
            metric=metric,
            statistic=statistic,
            a=a,
            b=a * ratio,
            ratio=ratio,
            low=ratio - 0.04,
            high=ratio + 0.04,
            verdict=verdict,
            failed=verdict == "worse",
        )
        for clients in (1, 4)
        for metric, statistic, a, ratio, verdict in (
            ("answered", "share", 1.0, 1.0, "same"),
            ("ttft_scheduled", "p50", 44.5, 1.02, "same"),
            ("itl", "p99", 12.5, 1.25, "worse"),
            ("output_tokens_per_second", "mean", 79.9, 1.1, "better"),
        )
    ]
    return Comparison(
        rows=rows,
        notes=["the machine differs: cores 2 and 4"],
        unmatched=["concurrency 16: only in the first run"],
        fail_on=0.05,
    )


async def apps() -> AsyncIterator[tuple[str, BenchApp, list[str]]]:
    """Name, application, the views of it to be looked at."""
    run = batch_run()
    yield (
        "batch",
        saved(run),
        ["steps", "percentiles", "requests"],
    )
    asked = server()
    for _ in range(75):
        await asked.ask()
    run = http_run()
    before = http_run(slower=0.8)
    app = BenchApp(ScreenOptions(title=ScreenTitle.of(run), run=run, other=before), asked)
    yield "http", app, list(VIEWS)
    live = BenchApp(ScreenOptions(title=ScreenTitle.of(run)))
    live.run_state = RunState()
    for event in (
        *step_events(0, 3, http_step(4)),
        *step_events(1, 3, http_step(16), upto=30),
    ):
        live.run_state.apply(event)
    yield "live", live, ["steps", "percentiles", "requests", "server", "compare"]


async def drawn_views(size: tuple[int, int]) -> AsyncIterator[tuple[str, list[str]]]:
    """Every screen's name and lines."""
    async for name, app in opened(size):
        yield name, cells(app)


async def opened(size: tuple[int, int]) -> AsyncIterator[tuple[str, BenchApp]]:
    """Every screen's name, and the application that shows it now."""
    async for name, app, names in apps():
        steady(app)
        async with app.run_test(size=size) as pilot:
            app.query_one(CompareView).comparison = compared()
            for view in names:
                await app.action_open(view)  # type: ignore[arg-type]
                await pilot.pause()
                await app.settle()
                await pilot.pause()
                yield f"{name}-{view}", app
