"""Estimates how likely a draft token is the right one, from what has followed earlier drafts.

A draft belongs to a class: where it comes from, and how many tokens before it match there (those
drafted before it included, for it counts only if they are right). Each class has an estimate of all
requests, which is the prior of each request's own. Both forget: they are moving averages.
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
"""Chances before anything is known."""

_PRIOR_WEIGHT = 4.0
"""Drafts that a prior counts as much as."""

_OWN_MEMORY = 0.95
_COMMON_MEMORY = 0.99
"""What is left of an average's weight after another draft."""

_MOST = 0.99
"""Limit of an estimate: no draft is certain."""


def class_of(source: DraftSource, length: int) -> int:
    """The class of a draft behind ``length`` tokens (at least 1) that match."""
    return source * CLASSES_OF_LENGTH + min((length - 1).bit_length(), CLASSES_OF_LENGTH - 1)


_SURE = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Bounds of the classes of drafts with weights."""


def class_of_chance(chance: float) -> int:
    """The class of a draft that a drafter with weights gives this probability.

    What it says is no estimate by itself: with sampling, a token of a small probability is chosen
    by both models if they are alike, for they share the noise.
    """
    return DraftSource.WEIGHTS * CLASSES_OF_LENGTH + bisect(_SURE, chance)


class Averages:
    """Drafts that were right, and the votes that they had, per class."""

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
        for source, chances in _PRIORS.items():
            for length, chance in enumerate(chances):
                kind = source * CLASSES_OF_LENGTH + length
                self._common.votes[kind] = _PRIOR_WEIGHT
                self._common.right[kind] = _PRIOR_WEIGHT * chance

    def chance(self, own: Averages, kind: int, share: float) -> float:
        """How likely a draft is right if those before it are.

        Args:
            own: of its request.
            kind: its class.
            share: of the votes, that the drafter gives it: at most 1.
        """
        common = self._common
        prior = common.right[kind] / common.votes[kind]
        right = own.right[kind] + _PRIOR_WEIGHT * prior
        return min(_MOST, share * right / (own.votes[kind] + _PRIOR_WEIGHT))

    def survivals(
        self, own: Averages, kinds: Iterable[int], shares: Iterable[float]
    ) -> list[float]:
        """The chances that each of some drafts and all before it are right.

        Args:
            own: of their request.
            kinds: their classes.
            shares: of the votes, that the drafter gives to each.
        """
        survival, survivals = 1.0, []
        for kind, share in zip(kinds, shares, strict=True):
            survival *= self.chance(own, kind, share)
            survivals.append(survival)
        return survivals

    def learn(self, own: Averages, kind: int, share: float, right: bool) -> None:
        """A draft that followed right ones was right, or wrong."""
        own.add(kind, share, right, _OWN_MEMORY)
        self._common.add(kind, share, right, _COMMON_MEMORY)
