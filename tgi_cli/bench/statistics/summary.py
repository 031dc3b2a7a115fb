"""A distribution in a few numbers, with intervals, and as a histogram."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tgi_cli.bench.statistics.bootstrap import interval, resampled

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
PERCENTILE_NAMES = ("p50", "p90", "p95", "p99", "p999")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one metric's values.

    Attributes:
        intervals: 95 % bootstrap intervals of ``mean`` and the percentiles, by these names; empty
            where none were asked for or there is one value only.
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
        """Value by percentile (``PERCENTILES``)."""
        return {p: getattr(self, n) for p, n in zip(PERCENTILES, PERCENTILE_NAMES, strict=True)}


def summarize(
    values: ArrayLike,
    clusters: NDArray[np.int64] | None = None,
    *,
    intervals: bool = True,
    seed: int = 0,
) -> Summary | None:
    """The summary of values; None if there are none.

    Percentiles are numpy's (linear between order statistics).

    Args:
        values: ``[n]``.
        clusters: ``[n]``, which request each is of, where one request gives several.
        seed: of the bootstrap; equal input and seed give equal intervals.
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


class Histogram(msgspec.Struct, frozen=True):
    """How many values lie in ``[edges[i], edges[i + 1])``; the last has its upper edge too."""

    edges: list[float]
    counts: list[int]


def histogram(values: ArrayLike, bins: int = 10, upper: float | None = None) -> Histogram:
    """Equal bins over the values' range, whose edges are round numbers where that is possible.

    Args:
        upper: values above it go into the last bin (a long tail would hide the body).
    """
    array = np.asarray(values, np.float64)
    if array.size == 0:
        return Histogram([0.0, 1.0], [0])
    if upper is not None:
        array = np.minimum(array, upper)
    low, high = float(array.min()), float(array.max())
    if high - low <= 1e-9 * max(1.0, abs(high)):  # all alike, but for rounding
        spread = abs(low) * 0.05 or 0.5
        low, high = low - spread, high + spread
    width = _round_up((high - low) / bins)
    start = math.floor(low / width) * width
    count = max(math.ceil((high - start) / width), 1)
    edges = start + width * np.arange(count + 1)
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    counts, _ = np.histogram(array, edges)
    return Histogram([float(edge) for edge in edges], [int(count) for count in counts])


def _round_up(width: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(width))
    return next((unit * step for step in (1, 2, 2.5, 5) if unit * step >= width), unit * 10)
