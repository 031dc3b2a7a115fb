"""Summaries of distributions, their confidence intervals, and histograms.

Intervals are percentile bootstraps, by request if requests have several values: the gaps of one
request are correlated, so requests are drawn, not gaps (the cluster bootstrap; Davison and Hinkley,
Bootstrap Methods and their Application, 1997, section 3.8). Draws are weights, never copies of the
values; the cumulative weights of a draw give its quantiles. The cost is bounded: at most ``BINS``
bins for values of clusters, and about ``WEIGHTS`` weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

REPLICATES = 1000
WEIGHTS = 4_000_000
"""Maximum of drawn numbers (32 MB), unless that leaves fewer than ``FEWEST`` replicates."""
FEWEST = 200
BINS = 1024
CONFIDENCE = 0.95

Floats = NDArray[np.float64]


def draws(clusters: int, seed: int) -> Floats:
    """How often each replicate draws each cluster, float64 ``[r, clusters]``."""
    replicates = int(np.clip(WEIGHTS // max(clusters, 1), FEWEST, REPLICATES))
    chosen = np.random.default_rng(seed).integers(0, clusters, (replicates, clusters))
    chosen += np.arange(replicates)[:, None] * clusters
    flat = np.bincount(chosen.ravel(), minlength=replicates * clusters)
    return flat.reshape(replicates, clusters).astype(np.float64)


def resampled(
    values: Floats, clusters: NDArray[np.int64] | None, percentiles: Sequence[float], seed: int
) -> Floats:
    """The mean and the percentiles of every replicate.

    Args:
        values: ``[n]``, n > 0.
        clusters: The request of each value, from 0, ``[n]``, or None if each has its own.

    Returns: float64 ``[replicates, 1 + len(percentiles)]``.
    """
    if clusters is None:
        order = np.argsort(values, kind="stable")
        points = values[order]
        weights = draws(len(values), seed)[:, order]
        sums, sizes = weights @ points, weights.sum(axis=1)
    else:
        names, number = np.unique(clusters, return_inverse=True)
        drawn = draws(len(names), seed)
        sums = drawn @ np.bincount(number, values, len(names))
        sizes = drawn @ np.bincount(number, minlength=len(names)).astype(np.float64)
        points, table = _tabulate(values, number, len(names))
        weights = drawn @ table
    return np.column_stack([sums / sizes, _quantiles(points, weights, percentiles)])


def interval(replicates: Floats) -> tuple[float, float]:
    """The middle 95 % of the replicates."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(replicates, [tail, 100 - tail])
    return float(low), float(high)


def _tabulate(values: Floats, number: NDArray[np.intp], clusters: int) -> tuple[Floats, Floats]:
    """Group values into bins by rank, finer towards the upper tail.

    Returns: The ascending values of the bins ``[b]``, and the count of each cluster in each bin
    ``[clusters, b]``.
    """
    order = np.argsort(values, kind="stable")
    count = len(values)
    if count <= BINS:
        edges = np.arange(count + 1)
    else:
        body = np.linspace(0, 1, BINS // 2)
        tail = 1 - np.geomspace(1e-1, 1 / count, BINS // 2)
        edges = np.unique(np.round(np.concatenate([body, tail]) * count).astype(np.int64))
    sizes = np.diff(edges)
    bins = np.repeat(np.arange(len(sizes)), sizes)
    points = np.add.reduceat(values[order], edges[:-1]) / sizes
    flat = np.bincount(number[order] * len(sizes) + bins, minlength=clusters * len(sizes))
    return points, flat.reshape(clusters, len(sizes)).astype(np.float64)


def _quantiles(points: Floats, weights: Floats, percentiles: Sequence[float]) -> Floats:
    """numpy's linear percentiles of values that occur ``weights`` times, ``[r, p]``."""
    reached = np.cumsum(weights, axis=1)
    total = reached[:, -1]
    # One search for all replicates: the sums of each are above those of the one before.
    base = np.concatenate([[0.0], np.cumsum(total)[:-1]])
    flat = (reached + base[:, None]).ravel()
    first = np.arange(len(weights)) * len(points)

    def at(rank: Floats) -> Floats:
        found = np.searchsorted(flat, rank + base, side="right") - first
        values: Floats = points[np.minimum(found, len(points) - 1)]
        return values

    columns = [np.empty((len(weights), 0))]
    for percentile in percentiles:
        rank = (total - 1) * percentile / 100
        low = np.floor(rank)
        below, above = at(low), at(np.minimum(low + 1, total - 1))
        columns.append(below + (above - below) * (rank - low))
    return np.column_stack(columns)


PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
PERCENTILE_NAMES = ("p50", "p90", "p95", "p99", "p999")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the values of a metric.

    Attributes:
        intervals: 95 % bootstrap intervals of ``mean`` and the percentiles, by these names; empty
            if not requested or for a single value.
    """

    count: int
    mean: float
    minimum: float
    maximum: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    intervals: dict[str, tuple[float, float]] = {}

    @property
    def percentiles(self) -> dict[float, float]:
        """Values by percentile (``PERCENTILES``)."""
        return {p: getattr(self, n) for p, n in zip(PERCENTILES, PERCENTILE_NAMES, strict=True)}


def summarize(
    values: ArrayLike,
    clusters: NDArray[np.int64] | None = None,
    *,
    intervals: bool = True,
    seed: int = 0,
) -> Summary | None:
    """Summarize values, or return None if there are none.

    Percentiles are numpy's (linear between order statistics).

    Args:
        values: Values ``[n]``.
        clusters: The request of each value, ``[n]``, if requests have several.
        seed: Seed of the bootstrap; equal input and seed give equal intervals.
    """
    array = np.asarray(values, np.float64)
    if array.size == 0:
        return None
    found: dict[str, tuple[float, float]] = {}
    if intervals and array.size > 1:
        replicates = resampled(array, clusters, PERCENTILES, seed)
        for column, name in enumerate(("mean", *PERCENTILE_NAMES)):
            found[name] = interval(replicates[:, column])
    cuts = np.percentile(array, PERCENTILES)
    return Summary(
        count=array.size,
        mean=float(array.mean()),
        minimum=float(array.min()),
        maximum=float(array.max()),
        **dict(zip(PERCENTILE_NAMES, map(float, cuts), strict=True)),
        intervals=found,
    )


class ValueHistogram(msgspec.Struct, frozen=True):
    """Counts of values in ``[edges[i], edges[i + 1])``; the last bin includes its upper edge."""

    edges: list[float]
    counts: list[int]


def histogram(values: ArrayLike, bins: int = 10, upper: float | None = None) -> ValueHistogram:
    """Count values in equal bins with round edges.

    Args:
        upper: Values above it are counted in the last bin (a long tail would hide the body).
    """
    array = np.asarray(values, np.float64)
    if array.size == 0:
        return ValueHistogram([0.0, 1.0], [0])
    if upper is not None:
        array = np.minimum(array, upper)
    low, high = float(array.min()), float(array.max())
    if high - low <= 1e-9 * max(1.0, abs(high)):  # all equal but for rounding
        spread = abs(low) * 0.05 or 0.5
        low, high = low - spread, high + spread
    width = round_up((high - low) / bins)
    start = math.floor(low / width) * width
    count = max(math.ceil((high - start) / width), 1)
    edges = start + width * np.arange(count + 1)
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    counts, _ = np.histogram(array, edges)
    return ValueHistogram([float(edge) for edge in edges], [int(count) for count in counts])


def round_up(value: float, factors: Sequence[float] = (1, 2, 2.5, 5)) -> float:
    """The smallest of ``factors`` times a power of ten that is at least ``value``, above 0."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next((unit * factor for factor in factors if unit * factor >= value), unit * 10)
