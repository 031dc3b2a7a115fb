"""From records to figures: what a client waited for, what a server got done, and how sure that is.

``step_figures`` is the whole of it for one step; the other names are its parts, for screens that
draw while a step still runs (``intervals=False`` is cheap enough to be called several times a
second). Every latency is in milliseconds, every rate per second. Requests and batches marked
``warmup`` never count. ``METRICS`` says what each name means.
"""

from tgi_cli.bench.statistics.batches import batch_values
from tgi_cli.bench.statistics.definitions import (
    BATCH_METRICS,
    LATENCIES,
    METRICS,
    RATES,
    Metric,
)
from tgi_cli.bench.statistics.goodput import good, parse_slo
from tgi_cli.bench.statistics.metrics import StepFigures, step_figures
from tgi_cli.bench.statistics.observations import Observed, counted, observe
from tgi_cli.bench.statistics.rates import windows
from tgi_cli.bench.statistics.summary import (
    PERCENTILES,
    Histogram,
    Summary,
    histogram,
    summarize,
)

__all__ = [
    "BATCH_METRICS",
    "LATENCIES",
    "METRICS",
    "PERCENTILES",
    "RATES",
    "Histogram",
    "Metric",
    "Observed",
    "StepFigures",
    "Summary",
    "batch_values",
    "counted",
    "good",
    "histogram",
    "observe",
    "parse_slo",
    "step_figures",
    "summarize",
    "windows",
]
