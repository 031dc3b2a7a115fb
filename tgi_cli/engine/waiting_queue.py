"""The queue of waiting sequences: by priority, then arrival, with a bound on overtaking."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from tgi_cli.engine.sequence import Sequence, Status, by_priority

MAX_OVERTAKEN = 64
"""Admissions of later sequences after which an overtaken one comes first."""


class WaitingQueue:
    """Sequences that wait for a row and blocks.

    Served in order of :attr:`Sequence.priority_key`. Sequences may overtake one that does not fit;
    once :data:`MAX_OVERTAKEN` more have been admitted than were ahead of it when it was queued, it
    is *starved*: it comes first, and none overtakes it any more.
    """

    def __init__(self) -> None:
        self._ranked: list[Sequence] = []
        self._by_arrival: deque[Sequence] = deque()
        self._admitted = 0
        self.num_tokens = 0
        """Tokens of all waiting sequences, as if nothing were cached."""

    def __len__(self) -> int:
        return len(self._ranked)

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence, or one that was preempted."""
        insort(self._ranked, sequence, key=by_priority)
        sequence.due = self._admitted + len(self._ranked)
        self._by_arrival.append(sequence)
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended while waiting."""
        self.num_tokens -= sequence.num_tokens
        del self._ranked[bisect_left(self._ranked, sequence.priority_key, key=by_priority)]

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted."""
        self.remove(sequence)
        self._admitted += 1

    def oldest(self) -> Sequence | None:
        """The sequence that has waited longest, or None."""
        arrivals = self._by_arrival
        while arrivals and arrivals[0].status is not Status.WAITING:
            arrivals.popleft()
        return arrivals[0] if arrivals else None

    def starved(self) -> Sequence | None:
        """The sequence that has waited longest, if too many have overtaken it."""
        oldest = self.oldest()
        if oldest is not None and self._admitted - oldest.due >= MAX_OVERTAKEN:
            return oldest
        return None

    def ranked(self, index: int) -> Sequence:
        """The sequence with ``index`` others ahead of it."""
        return self._ranked[index]
