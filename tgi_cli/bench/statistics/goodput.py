"""A service-level objective: which limits there are, and which requests meet them all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import RequestRecord
from tgi_cli.bench.statistics.observations import MS, tpot
from tgi_cli.bench.statistics.rates import windows

LIMITS = ("ttft", "tpot", "itl", "e2e")
"""What can be limited. A request's ``itl`` is its longest gap. All but ``tpot`` and ``itl`` are
counted from when the request was due: a user does not care whose queue it waited in."""


def parse_slo(text: str) -> dict[str, float]:
    """``ttft:200,tpot:50`` as limits by metric, in ms. Raises ValueError with what is wrong."""
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
            raise ValueError(f"{limit} ms is no limit that could be met")
    return slo


def good(requests: Sequence[RequestRecord], slo: Mapping[str, float]) -> NDArray[np.bool_]:
    """For each request whether it was answered within every limit. Returns: bool ``[n]``."""
    return np.array([_meets(request, slo) for request in requests], np.bool_)


def _meets(request: RequestRecord, slo: Mapping[str, float]) -> bool:
    if request.error is not None:
        return False
    taken: dict[str, float | None] = {
        "ttft": request.arrivals[0] - request.scheduled if request.arrivals else math.inf,
        "tpot": tpot(request),
        "itl": _longest_gap(request.arrivals),
        "e2e": request.finished - request.scheduled,
    }
    # Of one token there is no time between tokens, hence nothing that could be too long.
    return all((taken[name] or 0.0) * MS <= limit for name, limit in slo.items())


def _longest_gap(arrivals: Sequence[float]) -> float | None:
    return max((b - a for a, b in pairwise(arrivals)), default=None)


def goodput_windows(
    requests: Sequence[RequestRecord], slo: Mapping[str, float], duration: float, slices: int
) -> NDArray[np.float64]:
    """Answers within every limit, per second, in each slice of a step's time (``windows``)."""
    met = good(requests, slo)
    within = [request for request, is_good in zip(requests, met, strict=True) if is_good]
    start = min((request.scheduled for request in requests), default=0.0)
    return windows(within, duration, slices, start)["requests_per_second"]
