"""Where the device waits for the host: read from a trace of torch's profiler.

The kernels of one CUDA graph carry one correlation id. What stands between two graphs is the
host's part of a decode step: the sampler's launches, copies, and the time in which nothing runs.
The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMh4h6I0nSsKchNAySU
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
"""So many under one correlation id are a graph's."""

Span = tuple[float, float]
"""From, to; microseconds."""


@dataclass(frozen=True)
class Exposed:
    """What a trace shows, in microseconds.

    Attributes:
        steps: between which it was looked; each has one graph.
        step: median time from one graph's beginning to the next one's.
        graph: median time of a graph.
        between: median time from a graph's end to the next one's beginning, in which
        idle: nothing runs; that is what the host's slowness costs.
        idle_inside: in which nothing runs within a graph: gaps between its kernels.
        share: idle time of the step, as a share of it.
    """

    steps: int
    step: float
    graph: float
    between: float
    idle: float
    idle_inside: float
    share: float


def exposed(path: Path) -> Exposed | None:
    """The figures of an exported trace; None: it shows no two graphs."""
    return exposed_in(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def exposed_in(events: Iterable[Mapping[str, Any]]) -> Exposed | None:
    """The same of a list of trace events."""
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


def top_kernels(path: Path, runs: int, most: int = 12) -> list[dict[str, Any]]:
    """The kernels and copies that take the longest: microseconds and launches per run."""
    return top_kernels_in(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], runs, most)


def top_kernels_in(
    events: Iterable[Mapping[str, Any]], runs: int, most: int
) -> list[dict[str, Any]]:
    """The same of a list of trace events."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_THE_DEVICE:
            times[str(event.get("name", event["cat"]))[:90]].append(float(event["dur"]))
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {"kernel": name, "us": sum(spent) / runs, "launches": len(spent) / runs}
        for name, spent in ordered
    ]


def _idle(spans: Sequence[Span], start: float, end: float) -> float:
    """Time between ``start`` and ``end`` that no span covers; they are sorted."""
    free, at = 0.0, start
    for begin, until in spans:
        if until <= at:
            continue
        if begin >= end:
            break
        free += max(0.0, begin - at)
        at = until
    return free + max(0.0, end - at)
