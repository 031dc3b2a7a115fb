"""All metrics of one step, and where a server is saturated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tgi_cli.bench.events import BenchRequestRecord, BenchStep, StepRecord
from tgi_cli.bench.statistics.drafts import SourceDraftCounts, drafts_by_source
from tgi_cli.bench.statistics.observations import (
    METRICS,
    batch_values,
    latencies_of,
    without_warmup,
)
from tgi_cli.bench.statistics.rates import (
    SLICES,
    goodput_windows,
    meets_slo,
    rate_interval,
    windows,
)
from tgi_cli.bench.statistics.resolution import TOGETHER, doubtful, together, unresolved
from tgi_cli.bench.statistics.summary import Summary, summarize
from tgi_cli.config.settings import default
from tgi_cli.config.settings.setting import BENCH

MERGED = 1.05
"""Tokens per event above which ITL and TPOT differ."""
FEW = 20
"""Requests below which a p95 is little more than the maximum."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one step, without warm-ups.

    Attributes:
        duration: Seconds.
        requests: Number of requests, ``succeeded`` and ``failed``.
        errors: Number of errors by kind.
        input_tokens, output_tokens: Tokens of the successful requests.
        image_tokens: Of ``input_tokens``, those of images and of the template around them.
        latencies: Latencies by metric in ms; those without a value are absent, and those that the
            client could not resolve.
        unresolved: The latter, with the reasons.
        rates: Rates by metric, per second; ``goodput`` only with limits.
        rate_intervals: 95 % bootstrap intervals of the rates.
        batches: Metrics of the runs of a batch.
        attainment: Share of the requests that met every limit, or None without limits.
        acceptance: Share of the draft tokens that the server verified and accepted (speculative
            decoding), or None without any.
        drafts: Draft tokens by source, if the server reports it; docs/speculation.md
            describes the sources.
        tokens_per_event: Above 1 if the server sends several tokens in one event.
        together: Share of events that arrived together with the one before, as accepted drafts do.
        concurrency: Mean number of requests in flight.
        counted_by: Number of requests by what counted their tokens.
        warnings: Caveats about these metrics.
    """

    step: BenchStep
    duration: float
    requests: int
    succeeded: int
    failed: int
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    image_tokens: int
    latencies: dict[str, Summary]
    unresolved: dict[str, str]
    rates: dict[str, float]
    rate_intervals: dict[str, tuple[float, float]]
    batches: dict[str, Summary]
    attainment: float | None
    acceptance: float | None
    drafts: dict[str, SourceDraftCounts]
    tokens_per_event: float
    together: float
    concurrency: float
    counted_by: dict[str, int]
    warnings: list[str]

    @property
    def bursty(self) -> bool:
        """Whether tokens arrive in groups: then TPOT is the reading speed, and ITL is not."""
        return "itl" in self.unresolved or self.together > TOGETHER

    @property
    def runs(self) -> int:
        """Number of runs of a batch."""
        return self.batches["prefill"].count if "prefill" in self.batches else 0


def step_metrics(
    record: StepRecord, slo: Mapping[str, float] | None = None, *, intervals: bool = True
) -> StepMetrics:
    """Compute the metrics of a step.

    Args:
        slo: Limits by metric in ms (``parse_slo``).
        intervals: Whether to compute bootstrap intervals, which takes most of the time.
    """
    requests = without_warmup(record.requests)
    answered = [request for request in requests if request.error is None]
    errors = Counter(request.error for request in requests if request.error is not None)
    observed = latencies_of(record.requests)
    coarse = unresolved(record, observed)
    latencies = {
        name: summarize(values, clusters if name == "itl" else None, intervals=intervals)
        for name, (values, clusters) in observed.items()
        if name not in coarse
    }
    rates, rate_intervals = _rates(record, requests, slo or {}, intervals) if requests else ({}, {})
    batches = {
        name: summarize(values, intervals=intervals)
        for name, values in batch_values(record.batches).items()
    }
    events = sum(len(request.arrivals) for request in answered)
    output = sum(request.output_tokens for request in answered)
    busy = sum(request.finished - request.dispatched for request in requests)
    metrics = StepMetrics(
        step=record.step,
        duration=record.duration,
        requests=len(requests),
        succeeded=len(answered),
        failed=len(requests) - len(answered),
        errors=dict(errors.most_common()),
        input_tokens=sum(request.input_tokens for request in answered),
        output_tokens=output,
        image_tokens=sum(request.image_tokens for request in answered),
        latencies={name: summary for name, summary in latencies.items() if summary},
        unresolved=coarse,
        rates=rates,
        rate_intervals=rate_intervals,
        batches={name: summary for name, summary in batches.items() if summary},
        attainment=float(meets_slo(requests, slo).mean()) if slo and requests else None,
        acceptance=_acceptance(record.server),
        drafts=drafts_by_source(record.server),
        tokens_per_event=output / events if events else 0.0,
        together=together(observed),
        concurrency=busy / record.duration if record.duration > 0 else 0.0,
        counted_by=dict(Counter(request.counted_by for request in answered)),
        warnings=[],
    )
    warnings = _warnings(record, metrics)
    warnings += [
        f"{METRICS[name].label} is unresolved: {reason}"
        for name, reason in coarse.items()
        if not name.endswith("scheduled")
    ]
    doubts = {n: reason for n, reason in doubtful(record, observed).items() if n in latencies}
    warnings += [
        f"{METRICS[name].label} p99: {reason}"
        for name, reason in doubts.items()
        if not name.endswith("scheduled")
    ]
    if missing := [METRICS[name].label for name in slo or {} if name in coarse]:
        warnings.append(f"the limit on {' and '.join(missing)} cannot be checked")
    return msgspec.structs.replace(metrics, warnings=warnings)


def _acceptance(server: Mapping[str, float]) -> float | None:
    drafted = server.get("tgi_draft_tokens_total")
    return server.get("tgi_draft_accepted_tokens_total", 0.0) / drafted if drafted else None


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


def _warnings(record: StepRecord, metrics: StepMetrics) -> list[str]:
    warnings = []
    if record.client.behind:
        warnings.append(record.client.reason or "the load generator was the bottleneck")
    if metrics.requests and not metrics.succeeded:
        warnings.append("every request failed: there are no latencies")
    elif metrics.failed:
        share = metrics.failed / metrics.requests
        warnings.append(f"{metrics.failed} of {metrics.requests} requests failed ({share:.1%})")
    if 0 < metrics.succeeded < FEW and not metrics.batches:
        warnings.append(
            f"{metrics.succeeded} requests: p95 and above are little more than the maximum"
        )
    if metrics.tokens_per_event > MERGED:
        warnings.append(f"{metrics.tokens_per_event:.2f} tokens per event: gaps are between events")
    if metrics.together > TOGETHER and "itl" not in metrics.unresolved:
        warnings.append(
            f"{metrics.together:.0%} of the events arrived together with the one before: their "
            "ITL is 0, compare TPOT"
        )
    if metrics.counted_by.get("events"):
        warnings.append("the server reports no token counts: events are counted")
    if record.stopped:
        warnings.append(record.stopped)
    return warnings


ENOUGH: float = default("slo_share", BENCH)
"""Share of requests that must meet the limits (the SLO attainment of DistServe, OSDI 2024)."""
PEAK_SHARE = 0.95
SLOWER = 1.1


def meets(metrics: StepMetrics, enough: float = ENOUGH) -> bool:
    """Whether a share ``enough`` of the requests met the limits."""
    return metrics.attainment is not None and metrics.attainment >= enough


def find_knee(points: Sequence[StepMetrics]) -> int | None:
    """The position of the knee among steps by rising load, or None.

    The knee is the lowest load that reaches 95 % of the highest output throughput of all. There
    is one only if higher loads were tried and the highest has a median latency at least 10 %
    above: throughput no longer grows while latency does.
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
