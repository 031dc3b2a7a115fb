"""Throughput of a step and of its time slices, and goodput within limits (SLO)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import BenchRequestRecord
from tgi_cli.bench.statistics.observations import MS, tpot, without_warmup
from tgi_cli.bench.statistics.summary import draws, interval

SLICES = 20
MOST_SLICES = 1000

Floats = NDArray[np.float64]


def windows(
    requests: Sequence[BenchRequestRecord],
    duration: float,
    slices: int = SLICES,
    start: float | None = None,
) -> dict[str, Floats]:
    """The rates in equal slices of a step's time, by metric (all of ``RATES`` but goodput).

    A prompt counts at its first token, a token at its arrival, a request at its end. Failed
    requests do not count.

    Args:
        duration: Seconds from ``start``.
        slices: Number of slices, 1 to ``MOST_SLICES``.
        start: Default: when the first request that counts was due.

    Returns: Per second, float64 ``[slices]``. The mean is the rate of the step.
    """
    answered = [request for request in without_warmup(requests) if request.error is None]
    if start is None:
        start = min((request.scheduled for request in without_warmup(requests)), default=0.0)
    slices = min(max(slices, 1), MOST_SLICES)
    width = max(duration, 1e-9) / slices

    def binned(times: Sequence[float] | Floats, amounts: Sequence[float] | Floats) -> Floats:
        number = ((np.asarray(times, np.float64) - start) / width).astype(np.int64)
        number = np.clip(number, 0, slices - 1)
        return np.bincount(number, np.asarray(amounts, np.float64), slices) / width

    finished = binned([request.finished for request in answered], [1.0] * len(answered))
    first = [(r.arrivals[0] if r.arrivals else r.finished) for r in answered]
    read = binned(first, [float(request.input_tokens) for request in answered])
    times, amounts = _arrived(answered)
    written = binned(times, amounts)
    return {
        "requests_per_second": finished,
        "input_tokens_per_second": read,
        "output_tokens_per_second": written,
        "total_tokens_per_second": read + written,
    }


def _arrived(answered: Sequence[BenchRequestRecord]) -> tuple[Floats, Floats]:
    """When tokens arrived, and how many; the server's usage is spread over a request's events."""
    times: list[Floats] = [np.zeros(0)]
    amounts: list[Floats] = [np.zeros(0)]
    for request in answered:
        counts = np.asarray(request.counts, np.float64)
        if counts.sum() > 0:
            times.append(np.asarray(request.arrivals, np.float64))
            amounts.append(counts * (request.output_tokens / counts.sum()))
        else:
            times.append(np.array([request.finished]))
            amounts.append(np.array([float(request.output_tokens)]))
    return np.concatenate(times), np.concatenate(amounts)


def resampled_rate(values: Floats, seed: int = 0) -> Floats:
    """The mean rate of replicates that draw slices, float64 ``[replicates]``."""
    means: Floats = draws(len(values), seed) @ values / len(values)
    return means


def rate_interval(values: Floats, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a rate by a block bootstrap over its slices."""
    return interval(resampled_rate(values, seed))


LIMITS = ("ttft", "tpot", "itl", "e2e")
"""Metrics that can be limited. The ``itl`` of a request is its longest gap. ``ttft`` and ``e2e``
count from when the request was due: it does not matter to a user in which queue it waited."""


def parse_slo(text: str) -> dict[str, float]:
    """Parse ``ttft:200,tpot:50`` to limits in ms by metric. Raises ValueError."""
    slo: dict[str, float] = {}
    for part in text.split(","):
        name, colon, limit = part.strip().partition(":")
        if not colon or name not in LIMITS:
            raise ValueError(f"{part.strip()!r} is not METRIC:MS with one of {', '.join(LIMITS)}")
        if name in slo:
            raise ValueError(f"{name} is limited twice")
        try:
            slo[name] = float(limit)
        except ValueError:
            raise ValueError(f"{limit!r} is not a number of milliseconds") from None
        if not (math.isfinite(slo[name]) and slo[name] > 0):
            raise ValueError(f"{limit} ms is not a valid limit")
    return slo


def meets_slo(
    requests: Sequence[BenchRequestRecord], slo: Mapping[str, float]
) -> NDArray[np.bool_]:
    """Whether each request succeeded within every limit, bool ``[n]``."""
    return np.array([_meets(request, slo) for request in requests], np.bool_)


def _meets(request: BenchRequestRecord, slo: Mapping[str, float]) -> bool:
    if request.error is not None:
        return False
    taken: dict[str, float | None] = {
        "ttft": request.arrivals[0] - request.scheduled if request.arrivals else math.inf,
        "tpot": tpot(request),
        "itl": _longest_gap(request.arrivals),
        "e2e": request.finished - request.scheduled,
    }
    # A single token has no gaps that could be too long.
    return all((taken[name] or 0.0) * MS <= limit for name, limit in slo.items())


def _longest_gap(arrivals: Sequence[float]) -> float | None:
    return max((b - a for a, b in pairwise(arrivals)), default=None)


def goodput_windows(
    requests: Sequence[BenchRequestRecord], slo: Mapping[str, float], duration: float, slices: int
) -> NDArray[np.float64]:
    """Responses per second within every limit, in each slice of a step's time."""
    met = meets_slo(requests, slo)
    within = [request for request, is_good in zip(requests, met, strict=True) if is_good]
    start = min((request.scheduled for request in requests), default=0.0)
    return windows(within, duration, slices, start)["requests_per_second"]
