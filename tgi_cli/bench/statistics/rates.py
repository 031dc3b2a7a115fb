"""Throughput: what was done in a step's time, and in each slice of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import RequestRecord
from tgi_cli.bench.statistics.bootstrap import draws, interval
from tgi_cli.bench.statistics.observations import counted

SLICES = 20
MOST_SLICES = 1000

Floats = NDArray[np.float64]


def windows(
    requests: Sequence[RequestRecord],
    duration: float,
    slices: int = SLICES,
    start: float | None = None,
) -> dict[str, Floats]:
    """The rates in equal slices of a step's time, by metric (all of ``RATES`` but goodput).

    A prompt counts where its first token came, a token where it arrived, a request where it was
    whole. A request that failed counts for nothing.

    Args:
        duration: seconds, from ``start``.
        slices: 1 to ``MOST_SLICES``.
        start: None: when the first request that counts was due.

    Returns: float64 ``[slices]`` each, per second. Their mean is the rate of the step.
    """
    answered = [request for request in counted(requests) if request.error is None]
    if start is None:
        start = min((request.scheduled for request in counted(requests)), default=0.0)
    slices = min(max(slices, 1), MOST_SLICES)
    width = max(duration, 1e-9) / slices

    def binned(times: Sequence[float] | Floats, amounts: Sequence[float] | Floats) -> Floats:
        place = ((np.asarray(times, np.float64) - start) / width).astype(np.int64)
        place = np.clip(place, 0, slices - 1)
        return np.bincount(place, np.asarray(amounts, np.float64), slices) / width

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


def _arrived(answered: Sequence[RequestRecord]) -> tuple[Floats, Floats]:
    """When tokens came, and how many; the server's own count spread over a request's events."""
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
    """The mean rate in replicates that draw slices. Returns: float64 ``[replicates]``."""
    means: Floats = draws(len(values), seed) @ values / len(values)
    return means


def rate_interval(values: Floats, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a rate over its slices (a block bootstrap: a slice is a block)."""
    return interval(resampled_rate(values, seed))
