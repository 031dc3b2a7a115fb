"""What draft rows add to steps, learned from the durations of steps that verified drafts.

With m(d) for what d draft rows were measured to add at warm-up, as a share of a step without
drafts, a step with them takes

    1 + fixed + slope m(d)

steps without drafts. Durations vary by several percent from step to step, which is more than a
cheap row costs. Averages of a few durations would make some numbers of drafts look cheaper than
none by chance, and these would be chosen. So ``fixed`` and ``slope`` are estimated by Bayesian
linear regression (Bishop, Pattern Recognition and Machine Learning, 3.3) from the steps of all
numbers of drafts: they stay at 0 and 1 unless durations outweigh their noise. The estimate comes
with its standard deviation, which drafts have to gain in addition.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

_FIXED_DEVIATION = 0.04
"""Prior standard deviation of ``fixed``, around 0."""

_SLOPE_DEVIATION = 0.25
"""Prior standard deviation of ``slope``, around 1."""

_MEMORY = 0.98
"""Factor of the weight of earlier steps for each further step with drafts."""

_FORGET = 0.996
"""The same for each step without, so that what is not measured again does not stay wrong."""

_NOISE = 0.1
"""Standard deviation of a duration, as a share of it, before any was measured."""

_LEAST_NOISE, _MOST_NOISE = 0.03, 0.3

_NOISE_WEIGHT = 0.02
"""Weight of a new squared deviation in their average."""

_OUTLIER = 4.0
"""Factor by which a duration may differ from the expected one: beyond, other programs ran."""


class RowCosts:
    """The costs of draft rows in steps with similar numbers of sequences."""

    __slots__ = ("_counts", "_noise", "_sums")

    def __init__(self) -> None:
        self._counts = (0.0, 0.0, 0.0)
        """Weighted sums of 1, m and m * m over the steps."""
        self._sums = (0.0, 0.0)
        """Weighted sums of what steps took longer than measured, r, and of m * r."""
        self._noise = _NOISE * _NOISE

    def learn_plain(self, ratio: float) -> None:
        """Learn from a step without drafts that took ``ratio`` times as long as expected."""
        deviation = min(abs(ratio - 1.0), 1.0)
        self._noise += (deviation * deviation - self._noise) * _NOISE_WEIGHT
        self._scale(_FORGET)

    def learn(self, measured: float, duration: float) -> None:
        """Learn from a step with drafts.

        Args:
            measured: what its draft rows were measured to add.
            duration: of the step. Both in steps without drafts.
        """
        (expected, _) = self.predict([measured])[0]
        more = min(max(duration, expected / _OUTLIER), expected * _OUTLIER) - 1.0 - measured
        weight = 1.0 / (1.0 + measured) ** 2  # longer steps vary more
        self._scale(_MEMORY)
        ones, firsts, squares = self._counts
        moved = weight * measured
        self._counts = (ones + weight, firsts + moved, squares + moved * measured)
        self._sums = (self._sums[0] + weight * more, self._sums[1] + moved * more)

    def _scale(self, factor: float) -> None:
        ones, firsts, squares = self._counts
        self._counts = (ones * factor, firsts * factor, squares * factor)
        self._sums = (self._sums[0] * factor, self._sums[1] * factor)

    def predict(self, measured: Iterable[float]) -> list[tuple[float, float]]:
        """Expected durations, and their standard deviations, in steps without drafts.

        Args:
            measured: what draft rows were measured to add; for each, a duration is returned.
        """
        noise = min(max(self._noise, _LEAST_NOISE**2), _MOST_NOISE**2)
        ones, firsts, squares = (each / noise for each in self._counts)
        ones += 1.0 / _FIXED_DEVIATION**2
        squares += 1.0 / _SLOPE_DEVIATION**2
        first, second = (each / noise for each in self._sums)
        scale = 1.0 / (ones * squares - firsts * firsts)
        fixed = max(0.0, scale * (squares * first - firsts * second))
        slope = max(0.0, 1.0 + scale * (ones * second - firsts * first))
        # The variance is positive: of a regression with a prior.
        constant, linear, square = scale * squares, -2.0 * scale * firsts, scale * ones
        return [
            (1.0 + fixed + slope * each, sqrt(constant + each * (linear + square * each)))
            for each in measured
        ]
