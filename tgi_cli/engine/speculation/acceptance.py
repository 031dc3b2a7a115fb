"""Estimates how likely a draft token is accepted, from what followed earlier drafts.

A draft's class is its source, and how many tokens before it match there (including those drafted
before it, since it counts only if they are right). Each class has an estimate over all requests,
which is the prior of each request's own estimate. Both are moving averages.

The drafts with the highest estimates are verified, and these have been overestimated more often
than others. So what followed drafts is compared to their estimates, too, by ranges of estimates,
whether they were verified or not, and an estimate is reduced by the ratio by which those in its
range have been too high. Within a range, it makes no difference which drafts are chosen.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

from tgi_cli.engine.draft_source import DraftSource

CLASSES_OF_LENGTH = 6
"""Matches of 1, 2, 3 to 4, 5 to 8, 9 to 16, and more tokens."""

_PRIORS = {
    DraftSource.GRAMMAR: (0.95,) * CLASSES_OF_LENGTH,
    DraftSource.PREDICTION: (0.35, 0.5, 0.65, 0.8, 0.9, 0.95),
    DraftSource.CONTEXT: (0.12, 0.3, 0.45, 0.6, 0.75, 0.85),
    DraftSource.RECENT: (0.1, 0.25, 0.4, 0.55, 0.7, 0.8),
    DraftSource.WEIGHTS: (0.3, 0.4, 0.5, 0.65, 0.8, 0.93),
    DraftSource.UNSEEN: (0.7,) * CLASSES_OF_LENGTH,
}
"""Probabilities before any draft was observed."""

_PRIOR_WEIGHT = 4.0
"""Number of drafts that a prior weighs as much as."""

_OWN_MEMORY = 0.95
_COMMON_MEMORY = 0.99
"""Factor of an average's weight for each further draft."""

_MOST = 0.99
"""Limit of an estimate: no draft is certain."""

_RANGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Bounds of the ranges of estimates that are corrected separately."""

_NUM_RANGES = len(_RANGES) + 1

_RANGE_WEIGHT = 4.0
"""Number of right drafts that a range's estimates are trusted as much as, at first."""

_RANGE_MEMORY = 0.995
"""Factor of a range's earlier drafts for each further one."""


def class_of(source: DraftSource, length: int) -> int:
    """The class of a draft after ``length`` tokens (at least 1) that match."""
    return source * CLASSES_OF_LENGTH + min((length - 1).bit_length(), CLASSES_OF_LENGTH - 1)


_SURE = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Bounds of the classes of drafts with weights."""


def class_of_chance(chance: float) -> int:
    """The class of a draft that a drafter with weights gives this probability.

    The drafter's probability is no estimate by itself: with sampling, similar models choose the
    same unlikely token, as they share the noise.
    """
    return DraftSource.WEIGHTS * CLASSES_OF_LENGTH + bisect(_SURE, chance)


class Averages:
    """Drafts that were right, and their votes, per class."""

    __slots__ = ("right", "votes")

    def __init__(self) -> None:
        self.right = [0.0] * (len(DraftSource) * CLASSES_OF_LENGTH)
        self.votes = [0.0] * (len(DraftSource) * CLASSES_OF_LENGTH)

    def add(self, kind: int, share: float, right: bool, memory: float) -> None:
        self.right[kind] = self.right[kind] * memory + right
        self.votes[kind] = self.votes[kind] * memory + share


class Acceptance:
    """The estimates of one engine."""

    def __init__(self) -> None:
        self._common = Averages()
        ranges = len(DraftSource) * _NUM_RANGES
        self._right, self._expected = [0.0] * ranges, [0.0] * ranges
        """Drafts that were right, and the sum of their estimates, by source and range."""
        for source, chances in _PRIORS.items():
            for length, chance in enumerate(chances):
                kind = source * CLASSES_OF_LENGTH + length
                self._common.votes[kind] = _PRIOR_WEIGHT
                self._common.right[kind] = _PRIOR_WEIGHT * chance

    def chance(self, own: Averages, kind: int, share: float) -> float:
        """How likely a draft is right if those before it are.

        Args:
            own: averages of its request.
            kind: its class.
            share: its share of the drafter's votes, at most 1.
        """
        return self.survivals(own, (kind,), (share,))[0]

    def survivals(
        self, own: Averages, kinds: Iterable[int], shares: Iterable[float]
    ) -> list[float]:
        """The chances that each of some drafts and all before it are right.

        Args:
            own: averages of their request.
            kinds: their classes.
            shares: their shares of the drafter's votes.
        """
        all_right, all_expected, estimate_of = self._right, self._expected, self._estimate
        survival, survivals = 1.0, []
        for kind, share in zip(kinds, shares, strict=True):
            estimate, index = estimate_of(own, kind, share)
            survival *= estimate
            right, expected = all_right[index], all_expected[index]
            if right < expected:
                survival *= (right + _RANGE_WEIGHT) / (expected + _RANGE_WEIGHT)
            survivals.append(survival)
        return survivals

    def _estimate(self, own: Averages, kind: int, share: float) -> tuple[float, int]:
        """The chance of a draft without a correction, and the range of its source that it is in."""
        common = self._common
        prior = _PRIOR_WEIGHT * common.right[kind] / common.votes[kind]
        estimate = share * (own.right[kind] + prior) / (own.votes[kind] + _PRIOR_WEIGHT)
        if estimate > _MOST:
            estimate = _MOST
        return estimate, kind // CLASSES_OF_LENGTH * _NUM_RANGES + bisect(_RANGES, estimate)

    def learn(self, own: Averages, kind: int, share: float, right: bool) -> None:
        """Learn whether a draft, all before it being right, was right."""
        estimate, index = self._estimate(own, kind, share)
        self._right[index] = self._right[index] * _RANGE_MEMORY + right
        self._expected[index] = self._expected[index] * _RANGE_MEMORY + estimate
        own.add(kind, share, right, _OWN_MEMORY)
        self._common.add(kind, share, right, _COMMON_MEMORY)
