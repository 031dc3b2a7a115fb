"""Which latencies a load generator could resolve: those above its own lag.

A client that runs late reads the tokens of several steps at once. The gaps between them are then
zero, whatever the server did, and a latency below the client's lag is that lag.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import BenchRequestRecord, StepRecord
from tgi_cli.bench.statistics.observations import MS, LatencyValues

UNRESOLVED = 0.5
"""The client's median lag, as a share of a latency's median, from which that is not given."""
DOUBTFUL = 0.25
"""The 99th percentile of its lag, as a share of that of a latency, from which a warning says so."""
BURSTS = 0.2
"""Share of events that arrive with the one before, from which gaps between events are not given."""
TOGETHER = 0.05
"""Share of events that arrive with the one before above which the ITL is no reading speed."""
TIMER = 0.002
"""Seconds by which an idle event loop may be late: the resolution of its timers, and some more."""

_ACCEPTED = "tgi_draft_accepted_tokens_total"


def unresolved(record: StepRecord, observed: Mapping[str, LatencyValues]) -> dict[str, str]:
    """The latencies of a step that its client or network could not resolve, with the reasons.

    Args:
        observed: The step's latencies, in ms, as
            :func:`tgi_cli.bench.statistics.observations.latencies_of` returns them.
    """
    lag = record.client.lag_p50
    reasons = {}
    for name, values in measured(record, observed).items():
        typical = float(np.median(values)) if len(values) else 0.0
        if len(values) and lag > max(UNRESOLVED * typical, TIMER):
            reasons[name] = (
                f"the load generator lagged {lag * MS:.1f} ms itself (median), and this is about "
                f"{typical * MS:.1f} ms"
            )
    share = bursts(record, observed)
    if share > BURSTS:
        drafts = "" if _ACCEPTED in record.server else "the server drafts (speculation), or "
        reasons["itl"] = (
            f"{share:.0%} of the events arrived with the one before: {drafts}the client or the "
            "network was too slow to tell them apart"
        )
    return reasons


def doubtful(record: StepRecord, observed: Mapping[str, LatencyValues]) -> dict[str, str]:
    """The latencies whose tails may be the client's, with the reasons."""
    lag = record.client.lag_p99
    reasons = {}
    for name, (values, _) in observed.items():
        if name == "late" or not len(values):
            continue
        tail = float(np.percentile(values, 99)) / MS
        if lag > max(DOUBTFUL * tail, TIMER):
            reasons[name] = (
                f"the load generator's own lag reached {lag * MS:.0f} ms (p99), the p99 is "
                f"{tail * MS:.1f} ms"
            )
    return reasons


def measured(
    record: StepRecord, observed: Mapping[str, LatencyValues]
) -> dict[str, NDArray[np.float64]]:
    """The durations in seconds from which each latency is computed.

    For ITL it is their mean, since bursts have a median of 0; for TPOT the time from a request's
    first token to its last.
    """
    durations: dict[str, NDArray[np.float64]] = {
        name: values / MS
        for name, (values, _) in observed.items()
        if name not in ("itl", "tpot", "late")
    }
    gaps = observed["itl"].values
    durations["itl"] = np.array([gaps.mean() / MS] if gaps.size else [])
    spans = [
        request.arrivals[-1] - request.arrivals[0]
        for request in _answered(record)
        if len(request.arrivals) > 1
    ]
    durations["tpot"] = np.array(spans)
    return durations


def bursts(record: StepRecord, observed: Mapping[str, LatencyValues]) -> float:
    """Share of the gaps between events that are 0 though the server sent no drafts together."""
    accepted = record.server.get(_ACCEPTED, 0.0)
    events = sum(len(request.arrivals) for request in record.requests)
    return max(together(observed) - accepted / max(events, 1), 0.0)


def together(observed: Mapping[str, LatencyValues]) -> float:
    """Share of the events that arrived with the one before."""
    gaps = observed["itl"].values
    return float((gaps == 0).mean()) if gaps.size else 0.0


def _answered(record: StepRecord) -> list[BenchRequestRecord]:
    return [r for r in record.requests if r.error is None and not r.warmup]
