"""From records to figures: what a client waited for, what a server got done, and how sure that is.

``step_metrics`` is the whole of it for one step; the other names are its parts, for screens that
draw while a step still runs (``intervals=False`` is cheap enough to be called several times a
second). Every latency is in milliseconds, every rate per second. Requests and batches marked
``warmup`` never count. ``METRICS`` says what each name means.
"""

from tgi_cli.bench.statistics.metrics import StepMetrics, step_metrics
from tgi_cli.bench.statistics.observations import (
    BATCH_METRICS,
    LATENCIES,
    METRICS,
    RATES,
    LatencyValues,
    MetricDefinition,
    batch_values,
    latencies_of,
    without_warmup,
)
from tgi_cli.bench.statistics.rates import meets_slo, parse_slo, windows
from tgi_cli.bench.statistics.summary import (
    PERCENTILES,
    Summary,
    ValueHistogram,
    histogram,
    round_up,
    summarize,
)

__all__ = [
    "BATCH_METRICS",
    "LATENCIES",
    "METRICS",
    "PERCENTILES",
    "RATES",
    "LatencyValues",
    "MetricDefinition",
    "StepMetrics",
    "Summary",
    "ValueHistogram",
    "batch_values",
    "histogram",
    "latencies_of",
    "meets_slo",
    "parse_slo",
    "round_up",
    "step_metrics",
    "summarize",
    "windows",
    "without_warmup",
]
