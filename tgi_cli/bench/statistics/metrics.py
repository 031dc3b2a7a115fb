"""All figures of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tgi_cli.bench.events import BenchRequestRecord, BenchStep, StepRecord
from tgi_cli.bench.statistics.observations import batch_values, latencies_of, without_warmup
from tgi_cli.bench.statistics.rates import (
    SLICES,
    goodput_windows,
    meets_slo,
    rate_interval,
    windows,
)
from tgi_cli.bench.statistics.summary import Summary, summarize
from tgi_cli.config.settings import BENCH, default

MERGED = 1.05
"""Tokens in an event above which ITL and TPOT say different things."""
FEW = 20
"""Requests below which a p95 is hardly more than the maximum."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one step showed, warm-ups left out.

    Attributes:
        duration: seconds.
        requests: that count; ``succeeded`` and ``failed`` of them.
        errors: how many by kind.
        input_tokens, output_tokens: of the requests that succeeded.
        latencies: by metric, ms; those without a value are absent.
        rates: by metric, per second; ``goodput`` only with limits.
        rate_intervals: 95 % bootstrap intervals of them.
        batches: of runs of a batch, by metric.
        attainment: share of the requests that met every limit; None without limits.
        tokens_per_event: above 1 where the server sends several tokens in one event.
        concurrency: requests in flight on average (the sum of their times over the step's).
        counted_by: requests by who counted their tokens.
        warnings: what makes these figures less than they seem.
    """

    step: BenchStep
    duration: float
    requests: int
    succeeded: int
    failed: int
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    latencies: dict[str, Summary]
    rates: dict[str, float]
    rate_intervals: dict[str, tuple[float, float]]
    batches: dict[str, Summary]
    attainment: float | None
    tokens_per_event: float
    concurrency: float
    counted_by: dict[str, int]
    warnings: list[str]

    @property
    def runs(self) -> int:
        """Runs of a batch that count."""
        return self.batches["prefill"].count if "prefill" in self.batches else 0


def step_metrics(
    record: StepRecord, slo: Mapping[str, float] | None = None, *, intervals: bool = True
) -> StepMetrics:
    """The figures of a step.

    Args:
        slo: limits by metric in ms (``parse_slo``).
        intervals: with bootstrap intervals; without them it is many times faster.
    """
    requests = without_warmup(record.requests)
    answered = [request for request in requests if request.error is None]
    errors = Counter(request.error for request in requests if request.error is not None)
    latencies = {}
    for name, observed in latencies_of(record.requests).items():
        clusters = observed.clusters if name == "itl" else None
        summary = summarize(observed.values, clusters, intervals=intervals)
        if summary is not None:
            latencies[name] = summary
    rates, rate_intervals = _rates(record, requests, slo or {}, intervals) if requests else ({}, {})
    batches = {}
    for name, values in batch_values(record.batches).items():
        summary = summarize(values, intervals=intervals)
        if summary is not None:
            batches[name] = summary
    events = sum(len(request.arrivals) for request in answered)
    output = sum(request.output_tokens for request in answered)
    busy = sum(request.finished - request.dispatched for request in requests)
    figures = StepMetrics(
        step=record.step,
        duration=record.duration,
        requests=len(requests),
        succeeded=len(answered),
        failed=len(requests) - len(answered),
        errors=dict(errors.most_common()),
        input_tokens=sum(request.input_tokens for request in answered),
        output_tokens=output,
        latencies=latencies,
        rates=rates,
        rate_intervals=rate_intervals,
        batches=batches,
        attainment=float(meets_slo(requests, slo).mean()) if slo and requests else None,
        tokens_per_event=output / events if events else 0.0,
        concurrency=busy / record.duration if record.duration > 0 else 0.0,
        counted_by=dict(Counter(request.counted_by for request in answered)),
        warnings=[],
    )
    return msgspec.structs.replace(figures, warnings=_warnings(record, figures))


def _rates(
    record: StepRecord,
    requests: list[BenchRequestRecord],
    slo: Mapping[str, float],
    intervals: bool,
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    sliced = windows(requests, record.duration)
    if slo:
        sliced["goodput"] = goodput_windows(requests, slo, record.duration, SLICES)
    rates = {name: float(values.mean()) for name, values in sliced.items()}
    if not intervals:
        return rates, {}
    return rates, {name: rate_interval(values) for name, values in sliced.items()}


def _warnings(record: StepRecord, figures: StepMetrics) -> list[str]:
    warnings = []
    if record.client.behind:
        warnings.append(record.client.reason or "the load generator was the limit")
    if figures.requests and not figures.succeeded:
        warnings.append("every request failed: there are no latencies")
    elif figures.failed:
        share = figures.failed / figures.requests
        warnings.append(f"{figures.failed} of {figures.requests} requests failed ({share:.1%})")
    if 0 < figures.succeeded < FEW and not figures.batches:
        warnings.append(
            f"{figures.succeeded} requests: p95 and above are hardly more than the maximum"
        )
    if figures.tokens_per_event > MERGED:
        warnings.append(
            f"{figures.tokens_per_event:.2f} tokens came in an event: gaps are between events"
        )
    if figures.counted_by.get("events"):
        warnings.append("the server does not say how many tokens it sent: events are counted")
    if record.stopped:
        warnings.append(record.stopped)
    return warnings


ENOUGH: float = default("slo_share", BENCH)
"""Share of requests that must meet the limits (DistServe, OSDI 2024, calls it SLO attainment)."""
PEAK_SHARE = 0.95
SLOWER = 1.1


def meets(figures: StepMetrics, enough: float = ENOUGH) -> bool:
    """Whether a step with limits met them for a share ``enough`` of its requests."""
    return figures.attainment is not None and figures.attainment >= enough


def find_knee(points: Sequence[StepMetrics]) -> int | None:
    """Position of the knee among steps by rising load; None while there is none.

    The knee is the lowest load that reaches 95 % of the highest output throughput of all. It is
    one only if loads above it were tried and the highest of them has a median latency at least
    10 % above the knee's: throughput no longer grows while latency does.
    """
    usable = [i for i, point in enumerate(points) if point.succeeded and "e2e" in point.latencies]
    if len(usable) < 2:
        return None
    throughput = {i: points[i].rates["output_tokens_per_second"] for i in usable}
    highest = max(throughput.values())
    knee = next(i for i in usable if throughput[i] >= PEAK_SHARE * highest)
    last = usable[-1]
    if (
        last == knee
        or points[last].latencies["e2e"].p50 < SLOWER * points[knee].latencies["e2e"].p50
    ):
        return None
    return knee
