"""From filtered probabilities and one uniform number to a token: inverse-CDF sampling.

Probabilities become integers (in float32, which is exact enough), whose sums in float64 are exact
in any order. So the choice does not depend on how a device splits a sum, on the rest of the batch,
or on rounding at the edges: a token whose weight is zero is never chosen.

The uniform number of a token depends only on (seed, position). There is no generator with state,
so batch order, preemption and restarts cannot change what a seed yields, and the host can compute
a step's randomness before it knows the tokens before it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

SCALE = 2.0**48
"""Weight of probability 1: sums stay below 2**53, probabilities below 2**-48 round to 0."""

_GROUP = 128
"""Tokens per group; only the groups' sums and one group per row need a running sum."""


def weights_of(logits: Tensor) -> Tensor:
    """Integer weights proportional to softmax(logits): float32 [S, V], at most SCALE each."""
    return torch.softmax(logits, dim=-1).mul_(SCALE).floor_()


def choose(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token, in vocabulary order, at which the running sum exceeds its share.

    Args:
        weights: float32 [S, V], integers; zero for tokens that were filtered out.
        uniforms: float64 [S] in (0, 1).

    Returns:
        int64 [S]. Always a valid id, but meaningless for a row without finite weights.
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


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each (seed, position), on a grid of 2**-52.

    Seeds are hashed before positions enter, so that neighbouring seeds are unrelated streams.
    """
    stream = _mix(seeds + _GOLDEN)
    bits = _mix(stream ^ (positions.astype(np.uint64) * _GOLDEN))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele et al. 2014; Stafford's variant 13): a 64-bit bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
