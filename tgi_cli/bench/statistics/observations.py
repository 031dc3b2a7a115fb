"""What every figure means: its name in files, its label, its unit, which way is better."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import BatchRecord, BenchRequestRecord


class MetricDefinition(msgspec.Struct, frozen=True):
    """One figure.

    Attributes:
        name: in files and on the command line.
        label: in tables.
        unit: ``ms``, ``tokens/s`` or ``requests/s``.
        meaning: one sentence.
    """

    name: str
    label: str
    unit: str
    better: Literal["lower", "higher"]
    meaning: str


def _latency(name: str, label: str, meaning: str) -> MetricDefinition:
    return MetricDefinition(name, label, "ms", "lower", meaning)


def _rate(name: str, label: str, unit: str, meaning: str) -> MetricDefinition:
    return MetricDefinition(name, label, unit, "higher", meaning)


_LATENCIES = (
    _latency(
        "ttft",
        "TTFT",
        "Time to the first token: from dispatch to the first event that carries a token.",
    ),
    _latency(
        "ttft_scheduled",
        "TTFT (scheduled)",
        "The same from when the request was due: what a user waits who cannot be held back.",
    ),
    _latency(
        "itl",
        "ITL",
        "Inter-token latency: every gap between two consecutive events of a request, all gaps of "
        "all requests together; an event that brings several tokens ends one gap.",
    ),
    _latency(
        "tpot",
        "TPOT",
        "Time per output token, one value a request: from its first event to its last, over the "
        "tokens that came after the first event.",
    ),
    _latency("e2e", "E2E", "End to end: from dispatch until the answer is whole."),
    _latency(
        "e2e_scheduled",
        "E2E (scheduled)",
        "The same from when the request was due.",
    ),
    _latency("late", "Dispatch lag", "From when a request was due until it was dispatched."),
)
_RATES = (
    _rate("requests_per_second", "Requests", "requests/s", "Whole answers in the step's time."),
    _rate(
        "input_tokens_per_second",
        "Input",
        "tokens/s",
        "Tokens of the prompts that were answered, each prompt at its first token.",
    ),
    _rate("output_tokens_per_second", "Output", "tokens/s", "Tokens that arrived."),
    _rate("total_tokens_per_second", "Total", "tokens/s", "Both."),
    _rate("goodput", "Goodput", "requests/s", "Whole answers that met every limit of the SLO."),
)
_BATCH = (
    _latency("prefill", "Prefill", "One prefill call of a whole batch."),
    _latency(
        "decode_token",
        "Decode (token)",
        "A run's decode calls, over their number (decode length - 1).",
    ),
    _latency("decode_total", "Decode (total)", "A run's decode calls, all together."),
    _rate(
        "prefill_throughput",
        "Prefill",
        "tokens/s",
        "Batch size x sequence length over the prefill's time.",
    ),
    _rate(
        "decode_throughput",
        "Decode",
        "tokens/s",
        "Batch size x number of decode calls over their time.",
    ),
)

LATENCIES = tuple(metric.name for metric in _LATENCIES)
"""Of requests, in ms."""
RATES = tuple(metric.name for metric in _RATES)
"""Of a step of requests, per second."""
BATCH_METRICS = tuple(metric.name for metric in _BATCH)
"""Of runs of a batch."""
METRICS = {metric.name: metric for metric in (*_LATENCIES, *_RATES, *_BATCH)}


MS = 1000.0
MILLISECOND_DIGITS = 6
"""Of clocks: a nanosecond. Differences of times are rounded to it, so that equal gaps are equal."""


class LatencyValues(NamedTuple):
    """All values of one latency.

    Attributes:
        values: float64, ms, in the order of the requests.
        clusters: int64, for each value which of the requests (by position) it comes from.
    """

    values: NDArray[np.float64]
    clusters: NDArray[np.int64]


def without_warmup(requests: Iterable[BenchRequestRecord]) -> list[BenchRequestRecord]:
    """Those that are no warm-ups."""
    return [request for request in requests if not request.warmup]


def tokens_after_first(request: BenchRequestRecord) -> int:
    """How many of a request's tokens came after its first event."""
    if not request.counts:
        return 0
    if request.counted_by == "events":
        return sum(request.counts[1:])
    return max(request.output_tokens - request.counts[0], 0)


def tpot(request: BenchRequestRecord) -> float | None:
    """Seconds per token after the first event; None if nothing came after it."""
    after = tokens_after_first(request)
    if len(request.arrivals) < 2 or after == 0:
        return None
    return (request.arrivals[-1] - request.arrivals[0]) / after


def latencies_of(requests: Iterable[BenchRequestRecord]) -> dict[str, LatencyValues]:
    """Every latency of every request that counts and was answered, by metric.

    A failed request has no latency: it is an error, and counts as not good.
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
    """A value for each run that counts, by metric (``BATCH_METRICS``); ms and tokens/s.

    A decode length of 1 has no decode calls, so no values of decoding. Definitions:
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
    """Their ratio; a clock too coarse to see a call pass counts as its nanosecond."""
    return amount / np.maximum(seconds, 1e-9)
