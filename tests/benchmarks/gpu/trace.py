"""Finds the time in which the device waits for the host, in a trace of torch's profiler.

The kernels of a CUDA graph share a correlation id. Between two graphs are the other parts of a
decode step: kernels of the sampler, copies, and the time in which the device is idle.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMh4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ON_THE_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
GRAPH_KERNELS = 8
"""Fewest kernels with one correlation id that count as a graph."""

Span = tuple[float, float]
"""Start and end in microseconds."""


@dataclass(frozen=True)
class Exposed:
    """Exposed host time of decode steps. Medians, in microseconds.

    Attributes:
        steps: number of steps, each with one graph.
        step: time from the start of one graph to the start of the next.
        graph: time of a graph.
        between: time from the end of one graph to the start of the next.
        idle: part of ``between`` in which the device is idle, waiting for the host.
        idle_inside: idle time between the kernels of a graph.
        share: ``idle`` as a fraction of ``step``.
    """

    steps: int
    step: float
    graph: float
    between: float
    idle: float
    idle_inside: float
    share: float


def exposed(path: Path) -> Exposed | None:
    """Analyze an exported trace; return None if it has fewer than two graphs."""
    return exposed_in(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def exposed_in(events: Iterable[Mapping[str, Any]]) -> Exposed | None:
    """Like the function above, for a list of trace events."""
    groups: dict[int, list[Span]] = defaultdict(list)
    everything: list[Span] = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_THE_DEVICE:
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            everything.append(span)
            groups[event.get("args", {}).get("correlation", -1)].append(span)
    everything.sort()
    graphs = sorted(
        (min(start for start, _ in spans), max(end for _, end in spans), spans)
        for key, spans in groups.items()
        if key >= 0 and len(spans) >= GRAPH_KERNELS
    )
    if len(graphs) < 2:
        return None
    steps, between, idle, inside = [], [], [], []
    for (start, end, spans), (following, _, _) in pairwise(graphs):
        steps.append(following - start)
        between.append(max(0.0, following - end))
        idle.append(_idle(everything, end, following))
        inside.append(_idle(sorted(spans), start, end))
    step = statistics.median(steps)
    waiting = statistics.median(idle)
    return Exposed(
        steps=len(steps),
        step=step,
        graph=statistics.median(end - start for start, end, _ in graphs),
        between=statistics.median(between),
        idle=waiting,
        idle_inside=statistics.median(inside),
        share=waiting / step,
    )


def top_kernels(path: Path, runs: int, limit: int = 12) -> list[dict[str, Any]]:
    """Return the kernels and copies that take longest, with microseconds and launches per run."""
    return top_kernels_in(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], runs, limit)


def top_kernels_in(
    events: Iterable[Mapping[str, Any]], runs: int, limit: int
) -> list[dict[str, Any]]:
    """Like the function above, for a list of trace events."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_THE_DEVICE:
            times[str(event.get("name", event["cat"]))[:90]].append(float(event["dur"]))
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))[:limit]
    return [
        {"kernel": name, "us": sum(spent) / runs, "launches": len(spent) / runs}
        for name, spent in ordered
    ]


def _idle(spans: Sequence[Span], start: float, end: float) -> float:
    """Return the time between ``start`` and ``end`` that none of the sorted spans covers."""
    free, at = 0.0, start
    for begin, until in spans:
        if until <= at:
            continue
        if begin >= end:
            break
        free += max(0.0, begin - at)
        at = until
    return free + max(0.0, end - at)
