"""From filtered probabilities and one uniform number to a token: inverse-CDF sampling.

Probabilities are turned into integers (kept in float32, which holds them exactly enough), whose
sums in float64 are exact in every order. So the choice does not depend on how a device splits a
sum, on the batch around a row, or on rounding at the edges: a token whose weight is zero is
never chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SCALE = 2.0**48
"""Weight of a certain token: sums stay below 2**53, probabilities below 2**-48 round to 0."""

_GROUP = 128
"""Tokens per group: only the groups' sums and one group per row need a running sum."""


def weights_of(logits: Tensor) -> Tensor:
    """Integer weights proportional to softmax(logits): float32 [S, V], at most SCALE each."""
    return torch.softmax(logits, dim=-1).mul_(SCALE).floor_()


def choose(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token, in vocabulary order, at which the running sum exceeds its share.

    Args:
        weights: float32 [S, V], integers; zero for tokens that were filtered out.
        uniforms: float64 [S] in (0, 1).

    Returns:
        int64 [S]. Always a valid id; a row without finite weights gets a meaningless one.
    """
    count, vocab_size = weights.shape
    padding = -vocab_size % _GROUP
    if padding:
        weights = functional.pad(weights, (0, padding))
    groups = weights.view(count, -1, _GROUP)
    sums = groups.sum(dim=-1, dtype=torch.float64)
    ends = sums.cumsum(dim=-1)
    # Below the total even for the largest uniform: total - total x 2**-53 rounds down.
    target = (uniforms * ends[:, -1]).floor_().unsqueeze(1)
    group = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    target -= ends.gather(1, group) - sums.gather(1, group)
    within = groups[torch.arange(count, device=weights.device), group.squeeze(1)]
    ends = within.cumsum(dim=-1, dtype=torch.float64)
    offset = torch.searchsorted(ends, target, right=True).clamp_(max=_GROUP - 1)
    return (group * _GROUP + offset).squeeze(1).clamp_(max=vocab_size - 1)


def argmax(scores: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id among equals: int64 [N]."""
    if scores.device.type == "cpu":
        # Vectorized in numpy, scalar in torch: 4 against 43 us for 49152 entries.
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)
