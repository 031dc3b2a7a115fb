"""From a request's record to the times that its client waited."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import RequestRecord
from tgi_cli.bench.statistics.definitions import LATENCIES

MS = 1000.0
MILLISECOND_DIGITS = 6
"""Of clocks: a nanosecond. Differences of times are rounded to it, so that equal gaps are equal."""


class Observed(NamedTuple):
    """All values of one latency.

    Attributes:
        values: float64, ms, in the order of the requests.
        clusters: int64, for each value which of the requests (by position) it comes from.
    """

    values: NDArray[np.float64]
    clusters: NDArray[np.int64]


def counted(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those that are no warm-ups."""
    return [request for request in requests if not request.warmup]


def tokens_after_first(request: RequestRecord) -> int:
    """How many of a request's tokens came after its first event."""
    if not request.counts:
        return 0
    if request.counted_by == "events":
        return sum(request.counts[1:])
    return max(request.output_tokens - request.counts[0], 0)


def tpot(request: RequestRecord) -> float | None:
    """Seconds per token after the first event; None if nothing came after it."""
    after = tokens_after_first(request)
    if len(request.arrivals) < 2 or after == 0:
        return None
    return (request.arrivals[-1] - request.arrivals[0]) / after


def observe(requests: Iterable[RequestRecord]) -> dict[str, Observed]:
    """Every latency of every request that counts and was answered, by metric.

    A failed request has no latency: it is an error, and counts as not good.
    """
    answered = [request for request in counted(requests) if request.error is None]
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
        observed[name] = Observed(
            np.round(found.astype(np.float64) * MS, MILLISECOND_DIGITS),
            np.asarray(clusters[name], np.int64),
        )
    return observed
