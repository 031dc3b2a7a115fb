"""All figures of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from tgi_cli.bench.events import RequestRecord, Step, StepRecord
from tgi_cli.bench.statistics.batches import batch_values
from tgi_cli.bench.statistics.goodput import good, goodput_windows
from tgi_cli.bench.statistics.observations import counted, observe
from tgi_cli.bench.statistics.rates import SLICES, rate_interval, windows
from tgi_cli.bench.statistics.summary import Summary, summarize

MERGED = 1.05
"""Tokens in an event above which ITL and TPOT say different things."""
FEW = 20
"""Requests below which a p95 is hardly more than the maximum."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
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

    step: Step
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


def step_figures(
    record: StepRecord, slo: Mapping[str, float] | None = None, *, intervals: bool = True
) -> StepFigures:
    """The figures of a step.

    Args:
        slo: limits by metric in ms (``parse_slo``).
        intervals: with bootstrap intervals; without them it is many times faster.
    """
    requests = counted(record.requests)
    answered = [request for request in requests if request.error is None]
    errors = Counter(request.error for request in requests if request.error is not None)
    latencies = {}
    for name, observed in observe(record.requests).items():
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
    figures = StepFigures(
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
        attainment=float(good(requests, slo).mean()) if slo and requests else None,
        tokens_per_event=output / events if events else 0.0,
        concurrency=busy / record.duration if record.duration > 0 else 0.0,
        counted_by=dict(Counter(request.counted_by for request in answered)),
        warnings=[],
    )
    return msgspec.structs.replace(figures, warnings=_warnings(record, figures))


def _rates(
    record: StepRecord, requests: list[RequestRecord], slo: Mapping[str, float], intervals: bool
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    sliced = windows(requests, record.duration)
    if slo:
        sliced["goodput"] = goodput_windows(requests, slo, record.duration, SLICES)
    rates = {name: float(values.mean()) for name, values in sliced.items()}
    if not intervals:
        return rates, {}
    return rates, {name: rate_interval(values) for name, values in sliced.items()}


def _warnings(record: StepRecord, figures: StepFigures) -> list[str]:
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
