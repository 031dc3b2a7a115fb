"""The queue in front of the engine: by priority, then arrival, with a bound on injustice."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from tgi_cli.engine.sequence import Sequence, Status, by_priority

MAX_OVERTAKEN = 64
"""How many later ones may be admitted before one that does not fit, or ranks low."""


class WaitingQueue:
    """Sequences that wait for a row and blocks.

    Served in order of :attr:`Sequence.priority_key`. One that does not fit lets others pass; once
    :data:`MAX_OVERTAKEN` more have been admitted than stood before it when it came, it is
    *starved*, comes first, and nobody passes it any more.
    """

    def __init__(self) -> None:
        self._ranked: list[Sequence] = []
        self._by_arrival: deque[Sequence] = deque()
        self._admitted = 0
        self.num_tokens = 0
        """Tokens to be computed, over all that wait, as if nothing were cached."""

    def __len__(self) -> int:
        return len(self._ranked)

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence, or one that was preempted."""
        insort(self._ranked, sequence, key=by_priority)
        sequence.due = self._admitted + len(self._ranked)
        self._by_arrival.append(sequence)
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take out one that ended while it waited."""
        self.num_tokens -= sequence.num_tokens
        del self._ranked[bisect_left(self._ranked, sequence.priority_key, key=by_priority)]

    def admit(self, sequence: Sequence) -> None:
        """Take out one that got its place."""
        self.remove(sequence)
        self._admitted += 1

    def oldest(self) -> Sequence | None:
        """The one that has stood here longest."""
        arrivals = self._by_arrival
        while arrivals and arrivals[0].status is not Status.WAITING:
            arrivals.popleft()
        return arrivals[0] if arrivals else None

    def starved(self) -> Sequence | None:
        """The longest waiting sequence, if too many were admitted since it came."""
        oldest = self.oldest()
        if oldest is not None and self._admitted - oldest.due >= MAX_OVERTAKEN:
            return oldest
        return None

    def ranked(self, index: int) -> Sequence:
        """The one that is served after ``index`` others."""
        return self._ranked[index]
