"""The definitions of all metrics, and their values from records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import BatchRecord, BenchRequestRecord


class MetricDefinition(msgspec.Struct, frozen=True):
    """A metric.

    Attributes:
        name: Name in files and on the command line.
        label: Label in tables.
        unit: ``ms``, ``tokens/s`` or ``requests/s``.
        meaning: Definition in one sentence.
    """

    name: str
    label: str
    unit: str
    meaning: str

    @property
    def better(self) -> Literal["lower", "higher"]:
        """Which values are better."""
        return "lower" if self.unit == "ms" else "higher"


_LATENCIES = (
    ("ttft", "TTFT", "Time to first token: from dispatch to the first event with a token."),
    ("ttft_scheduled", "TTFT (scheduled)", "TTFT from when the request was due."),
    (
        "itl",
        "ITL",
        "Inter-token latency: all gaps between consecutive events of all requests; an event with "
        "several tokens ends one gap.",
    ),
    (
        "tpot",
        "TPOT",
        "Time per output token, one value per request: from its first event to its last, over the "
        "tokens after the first event.",
    ),
    ("e2e", "E2E", "End-to-end latency: from dispatch until the response is complete."),
    ("e2e_scheduled", "E2E (scheduled)", "E2E from when the request was due."),
    ("late", "Dispatch lag", "From when a request was due until it was dispatched."),
)
_RATES = (
    ("requests_per_second", "Requests", "requests/s", "Complete responses."),
    ("input_tokens_per_second", "Input", "tokens/s", "Prompt tokens, at the first output token."),
    ("output_tokens_per_second", "Output", "tokens/s", "Tokens that arrived."),
    ("total_tokens_per_second", "Total", "tokens/s", "Input and output tokens."),
    ("goodput", "Goodput", "requests/s", "Complete responses within every limit of the SLO."),
)
_BATCH_LATENCIES = (
    ("prefill", "Prefill", "One prefill call of a whole batch."),
    ("decode_token", "Decode (token)", "Mean decode call of a run (decode length - 1 calls)."),
    ("decode_total", "Decode (total)", "All decode calls of a run together."),
)
_BATCH_RATES = (
    ("prefill_throughput", "Prefill", "tokens/s", "Batch size x sequence length over the prefill."),
    ("decode_throughput", "Decode", "tokens/s", "Batch size x decode calls over their time."),
)
METRICS = {
    name: MetricDefinition(name, label, unit, meaning)
    for name, label, unit, meaning in (
        *((name, label, "ms", meaning) for name, label, meaning in _LATENCIES),
        *_RATES,
        *((name, label, "ms", meaning) for name, label, meaning in _BATCH_LATENCIES),
        *_BATCH_RATES,
    )
}
LATENCIES = tuple(row[0] for row in _LATENCIES)
"""Latencies of requests."""
RATES = tuple(row[0] for row in _RATES)
"""Rates of a step of requests."""
BATCH_METRICS = tuple(row[0] for row in (*_BATCH_LATENCIES, *_BATCH_RATES))
"""Metrics of the runs of a batch."""
MS = 1000.0
MILLISECOND_DIGITS = 6
"""Digits of milliseconds: differences are rounded to nanoseconds, so that equal gaps are equal."""


class LatencyValues(NamedTuple):
    """The values of one latency.

    Attributes:
        values: Milliseconds in the order of the requests, float64.
        clusters: The position of the request of each value, int64.
    """

    values: NDArray[np.float64]
    clusters: NDArray[np.int64]


def without_warmup(requests: Iterable[BenchRequestRecord]) -> list[BenchRequestRecord]:
    """The requests that are not warm-ups."""
    return [request for request in requests if not request.warmup]


def measured_seconds(requests: Iterable[BenchRequestRecord]) -> float:
    """Seconds from when the first request that counts was due to the end of the last.

    Requests that the end of a step has cut off do not extend it.
    """
    counted = without_warmup(requests)
    if not counted:
        return 0.0
    whole = [request for request in counted if request.error != "unfinished"] or counted
    return max(r.finished for r in whole) - min(r.scheduled for r in counted)


def tokens_after_first(request: BenchRequestRecord) -> int:
    """Tokens of a request after its first event."""
    if not request.counts:
        return 0
    if request.counted_by == "events":
        return sum(request.counts[1:])
    return max(request.output_tokens - request.counts[0], 0)


def tpot(request: BenchRequestRecord) -> float | None:
    """Seconds per token after the first event, or None without such tokens."""
    after = tokens_after_first(request)
    if len(request.arrivals) < 2 or after == 0:
        return None
    return (request.arrivals[-1] - request.arrivals[0]) / after


def latencies_of(requests: Iterable[BenchRequestRecord]) -> dict[str, LatencyValues]:
    """All latencies of the successful requests that count, by metric.

    Failed requests have no latencies; they count as errors, and as outside the limits.
    """
    answered = [request for request in without_warmup(requests) if request.error is None]
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    clusters: dict[str, list[int]] = {name: [] for name in LATENCIES}

    def add(name: str, cluster: int, seconds: float) -> None:
        values[name].append(seconds)
        clusters[name].append(cluster)

    gaps: list[NDArray[np.float64]] = []
    for number, request in enumerate(answered):
        add("late", number, request.dispatched - request.scheduled)
        add("e2e", number, request.finished - request.dispatched)
        add("e2e_scheduled", number, request.finished - request.scheduled)
        if request.arrivals:
            add("ttft", number, request.arrivals[0] - request.dispatched)
            add("ttft_scheduled", number, request.arrivals[0] - request.scheduled)
            gaps.append(np.diff(np.asarray(request.arrivals, np.float64)))
            clusters["itl"].extend([number] * len(gaps[-1]))
        per_token = tpot(request)
        if per_token is not None:
            add("tpot", number, per_token)
    observed = {}
    for name in LATENCIES:
        found = np.concatenate(gaps) if name == "itl" and gaps else np.asarray(values[name])
        observed[name] = LatencyValues(
            np.round(found.astype(np.float64) * MS, MILLISECOND_DIGITS),
            np.asarray(clusters[name], np.int64),
        )
    return observed


def batch_values(batches: Iterable[BatchRecord]) -> dict[str, NDArray[np.float64]]:
    """The values of each run that counts, by metric (``BATCH_METRICS``), in ms and tokens/s.

    With a decode length of 1 there are no decode calls. The definitions are those of
    github.com/huggingface/text-generation-inference, benchmark/src/generation.rs.
    """
    runs = [batch for batch in batches if not batch.warmup]
    prefill = np.array([run.prefill for run in runs])
    tokens = np.array([run.batch_size * run.sequence_length for run in runs])
    decoding = [run for run in runs if run.decodes]
    total = np.array([sum(run.decodes) for run in decoding])
    calls = np.array([len(run.decodes) for run in decoding])
    sizes = np.array([run.batch_size for run in decoding])
    return {
        "prefill": prefill * MS,
        "decode_token": total / calls * MS,
        "decode_total": total * MS,
        "prefill_throughput": _per_second(tokens, prefill),
        "decode_throughput": _per_second(sizes * calls, total),
    }


def _per_second(amount: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ratio; a duration below the resolution of the clock counts as a nanosecond."""
    return amount / np.maximum(seconds, 1e-9)
