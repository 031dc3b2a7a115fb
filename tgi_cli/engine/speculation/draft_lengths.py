"""How many drafts a step verifies: the number with which the streams advance fastest.

A step of B sequences with d draft rows takes T(B + d). A stream of which drafts with the survivals
s1, s2, ... (the probabilities that a draft and all before it are right) are verified gets
1 + s1 + s2 + ... tokens in that time, and one without drafts gets 1: a row of one sequence makes
the step longer for all. So what is maximized is the geometric mean of the streams' rates

    sum over the streams of log(1 + s1 + s2 + ...) - B log(T(B + d) / T(B))

which is proportional fairness (Kelly et al. 1998, http://www.statslab.cam.ac.uk/~frank/rate.html).
The sum of the rates, which is SmartSpec's goodput (Liu et al. 2024,
https://arxiv.org/abs/2406.14066), would let a few streams that repeat a text slow down many that do
not. For one stream both are the same. Draft rows are added by descending gain. So their number
follows the load: with few sequences, a step is bound by memory and rows are nearly free; with many,
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p

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
        A number per sequence.
    """
    offered = []
    for index, row in enumerate(survivals):
        tokens = 1.0
        for chance in row:
            offered.append((chance / tokens, index))
            tokens += chance
    offered.sort(reverse=True)
    count, plain = len(survivals), durations[0]
    total, best, taken = 0.0, count * log(margin), 0
    for rows, ((share, _), duration) in enumerate(zip(offered, durations[1:], strict=False), 1):
        total += log1p(share)
        found = total - count * log(duration / plain)
        if found > best:
            best, taken = found, rows
    lengths = [0] * count
    for _, index in offered[:taken]:
        lengths[index] += 1
    return lengths


def gain(
    survivals: Sequence[Sequence[float]], lengths: Sequence[int], durations: Sequence[float]
) -> float:
    """The factor by which these numbers of drafts raise the geometric mean of the streams' rates.

    Args:
        survivals, durations: as for :func:`choose_lengths`.
        lengths: number of drafts of each sequence.
    """
    tokens = (1.0 + sum(row[:count]) for row, count in zip(survivals, lengths, strict=True))
    mean = sum(map(log, tokens)) / len(survivals)
    return exp(mean) * durations[0] / durations[sum(lengths)]


def break_even(sequences: int, durations: Sequence[float], margin: float = MARGIN) -> float:
    """The least survival with which some number of drafts is worth it, if all of them have it.

    Drafts that are less likely are worth no row; 1 and more if none is.

    Args:
        sequences: number of sequences in the step.
        durations, margin: as for :func:`choose_lengths`.
    """
    least, factor = 1.0, margin / durations[0]
    for count, duration in enumerate(durations[1:], 1):
        needed = factor * duration
        if count >= sequences:  # as many of each sequence
            found = (needed - 1) * sequences / count
        elif needed < 1 + count / sequences:  # one of some sequences
            found = needed ** (sequences / count) - 1
        else:
            continue
        least = min(least, found)
    return max(0.0, least)


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
