"""Where a server is saturated, and whether a step met its limits."""

from __future__ import annotations

from collections.abc import Sequence

from tgi_cli.bench.statistics.metrics import StepFigures

ENOUGH = 0.9
"""Share of requests that must meet the limits (DistServe, OSDI 2024, calls it SLO attainment)."""
PEAK_SHARE = 0.95
SLOWER = 1.1


def meets(figures: StepFigures, enough: float = ENOUGH) -> bool:
    """Whether a step with limits met them for a share ``enough`` of its requests."""
    return figures.attainment is not None and figures.attainment >= enough


def find_knee(points: Sequence[StepFigures]) -> int | None:
    """Position of the knee among steps by rising load; None while there is none.

    The knee is the lowest load that reaches 95 % of the highest output throughput of all. It is
    one only if loads above it were tried and the highest of them has a median latency at least
    10 % above the knee's: throughput no longer grows while latency does.
    """
    usable = [i for i, point in enumerate(points) if point.succeeded and "e2e" in point.latencies]
    if len(usable) < 2:
        return None
    throughput = {i: points[i].rates["output_tokens_per_second"] for i in usable}
    highest = max(throughput.values())
    knee = next(i for i in usable if throughput[i] >= PEAK_SHARE * highest)
    last = usable[-1]
    if (
        last == knee
        or points[last].latencies["e2e"].p50 < SLOWER * points[knee].latencies["e2e"].p50
    ):
        return None
    return knee
