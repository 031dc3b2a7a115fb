"""What every figure means: its name in files, its label, its unit, which way is better."""

from __future__ import annotations

from typing import Literal

import msgspec


class Metric(msgspec.Struct, frozen=True):
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


def _latency(name: str, label: str, meaning: str) -> Metric:
    return Metric(name, label, "ms", "lower", meaning)


def _rate(name: str, label: str, unit: str, meaning: str) -> Metric:
    return Metric(name, label, unit, "higher", meaning)


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
