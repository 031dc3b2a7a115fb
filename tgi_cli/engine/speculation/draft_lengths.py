"""How many drafts a step verifies: the number that gives the most tokens per second.

A step of B sequences with d draft rows takes the time T(B + d) and gives B + S tokens, where S is
the sum of the drafts' survivals: the probabilities that a draft and all before it are right. Draft
rows are added by descending survival, until (B + S) / T(B + d) is largest. So the number follows
the load: with few sequences, a step is bound by memory and rows are nearly free; with many, not
(SmartSpec's goodput, Liu et al. 2024, https://arxiv.org/abs/2406.14066, with survivals for each
request in place of one for all).
"""

from __future__ import annotations

from collections.abc import Sequence

MARGIN = 1.02
"""Least gain that drafts must promise, as a factor: estimates are no more exact."""


def choose_lengths(
    survivals: Sequence[Sequence[float]], durations: Sequence[float], margin: float = MARGIN
) -> list[int]:
    """The number of drafts that the next step verifies for each sequence.

    Args:
        survivals: survivals of each sequence's drafts, in order and descending; empty for none.
        durations: durations of a step with 0, 1, 2, ... draft rows, in any unit.
        margin: least gain, as a factor.

    Returns:
        A number per sequence. Takes 1.5 us for one sequence with 7 drafts, 25 us for 8.
    """
    offered = [(chance, index) for index, row in enumerate(survivals) for chance in row]
    offered.sort(reverse=True)
    tokens = float(len(survivals))
    best, taken = margin * tokens / durations[0], 0
    for count, ((chance, _), duration) in enumerate(zip(offered, durations[1:], strict=False), 1):
        tokens += chance
        rate = tokens / duration
        if rate > best:
            best, taken = rate, count
    lengths = [0] * len(survivals)
    for _, index in offered[:taken]:
        lengths[index] += 1
    return lengths


def may_pay(sequences: int, durations: Sequence[float], margin: float = MARGIN) -> bool:
    """Whether any number of drafts would be worth it, if all of them were right.

    Args:
        sequences: number of sequences in the step.
        durations, margin: as for :func:`choose_lengths`.
    """
    rates = ((sequences + count) / duration for count, duration in enumerate(durations))
    return max(rates) > margin * sequences / durations[0]


def saved_per_token(
    sequences: int, survivals: Sequence[float], durations: Sequence[float]
) -> float:
    """Time that drafts save per token, in steps without drafts, if all sequences have as many.

    Args:
        sequences: number of sequences in the step.
        survivals: survivals of the drafts of each, in order and descending.
        durations: as for :func:`choose_lengths`.

    Returns:
        At least 0.
    """
    best, tokens = 0.0, 1.0
    for chance, duration in zip(survivals, durations[sequences::sequences], strict=False):
        tokens += chance
        best = max(best, 1 - duration / durations[0] / tokens)
    return best / sequences
