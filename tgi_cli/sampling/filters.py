"""top_k, top_p, min_p and typical_p, as thresholds on each row's weights.

A filter keeps the tokens that reach a threshold, so it treats tokens of equal weight alike: the
result depends on a row's values alone, never on how a sort orders equals or on the rest of the
batch. So top_k keeps more than k tokens when several are equally likely (as transformers does),
and top_p keeps the smallest set that reaches p and all ties of its least likely member.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.sampling.table import MIN_P, TOP_K, TOP_P, TYPICAL, SamplingBatch
from tgi_cli.sampling.upload import Upload

MAX_SORTED = 1 << 22
"""Weights sorted at once; bounds the temporary memory (about 40 bytes each)."""

ROW_BY_ROW = ("cpu",)
"""Devices that share the host's memory, where sorting all rows is slower than row by row."""

_SORTABLE = 1024
"""Keys that :func:`_select` sorts rather than splits."""


def filter_weights(weights: Tensor, batch: SamplingBatch, upload: Upload) -> None:
    """Set the weights of filtered tokens to zero, in place; at least one per row remains.

    Args:
        weights: float32 [S, V], integers proportional to the probabilities; contiguous.
        batch: the S entries.
        upload: brings host arrays to the device.
    """
    threshold = torch.zeros(len(batch), device=weights.device)
    if batch.flags & TOP_K:
        threshold = _top_k(weights, batch, upload)
    if batch.flags & TOP_P:
        threshold = _top_p(weights, threshold, batch, upload)
    if batch.flags & MIN_P:
        # Relative to the likeliest token, which all earlier filters keep.
        (min_p,) = upload(batch.column("min_p"))
        threshold = torch.maximum(threshold, (weights.amax(dim=-1) * min_p).ceil_())
    if batch.flags & (TOP_K | TOP_P | MIN_P):
        # 1 from the threshold on, 0 below: between integers nothing is less than 1 apart. Where
        # torch masks instead, a CPU takes three times as long.
        reaches = (weights - threshold.unsqueeze(1)).add_(1.0).clamp_(0.0, 1.0)
        weights.mul_(reaches)
    if batch.flags & TYPICAL:
        _typical(weights, batch, upload)


def _top_k(weights: Tensor, batch: SamplingBatch, upload: Upload) -> Tensor:
    """The k-th highest weight of each row, 0 without top_k (Fan et al. 2018)."""
    ks = np.minimum(batch.records["top_k"], weights.shape[1])
    highest = weights.topk(int(ks.max()), dim=-1).values
    indices, everything = upload(np.maximum(ks, 1) - 1, ks == 0)
    return highest.gather(1, indices.unsqueeze(1)).squeeze(1).masked_fill_(everything, 0.0)


def _top_p(weights: Tensor, floor: Tensor, batch: SamplingBatch, upload: Upload) -> Tensor:
    """Raise ``floor`` to the nucleus (Holtzman et al. 2020) of the tokens that reach it."""
    entries = batch.where(TOP_P)
    shares = batch.records["top_p"][entries]
    if weights.device.type in ROW_BY_ROW:
        rows, limits = weights.numpy(), floor.numpy()
        for entry, share in zip(entries.tolist(), shares.tolist(), strict=True):
            limits[entry] = nucleus_of_row(rows[entry], limits[entry], share)
        return floor
    for part in _splits(len(entries), weights.shape[1]):
        selected, share = upload(entries[part], shares[part])
        floor[selected] = nucleus(weights[selected], floor[selected], share)
    return floor


def nucleus(weights: Tensor, floor: Tensor, share: Tensor) -> Tensor:
    """The highest weight that bounds a set which holds ``share`` of what reaches ``floor``.

    Sorts, and does not wait for the device.

    Args:
        weights: float32 [S, V], integers; floor: float32 [S]; share: float64 [S] in (0, 1].

    Returns:
        float32 [S].
    """
    weights = weights.masked_fill(weights < floor.unsqueeze(1), 0.0)
    descending = weights.sort(dim=-1, descending=True).values
    mass = descending.cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(mass, _needed(mass[:, -1], share).unsqueeze(1))
    return descending.gather(1, last.clamp_(max=weights.shape[1] - 1)).squeeze(1)


def nucleus_of_row(weights: NDArray[np.float32], floor: float, share: float) -> float:
    """As :func:`nucleus`, for one row on the host; sorts only weights that can matter."""
    if floor > 0:
        weights = weights[weights >= floor]
    total = float(weights.sum(dtype=np.float64))
    if not 0 < total < math.inf:
        return 0.0
    needed = max(1.0, math.ceil(total * share))
    # Tokens of at most (total - needed) / V sum to at most total - needed, so the others reach
    # `needed` without them, and in a peaked distribution they are few. (Lowered slightly, since
    # the comparison rounds it to float32.)
    cutoff = (total - needed) / len(weights) * (1 - 2.0**-22)
    weights = weights[weights > cutoff]
    return _select(weights, weights, needed)


def _typical(weights: Tensor, batch: SamplingBatch, upload: Upload) -> None:
    """Keep the tokens whose surprise is nearest to the entropy (Meister et al. 2022)."""
    entries = batch.where(TYPICAL)
    shares = batch.records["typical_p"][entries]
    if weights.device.type in ROW_BY_ROW:
        rows = weights.numpy()
        for entry, share in zip(entries.tolist(), shares.tolist(), strict=True):
            typical_of_row(rows[entry], share)
        return
    for part in _splits(len(entries), weights.shape[1]):
        selected, share = upload(entries[part], shares[part])
        weights[selected] = typical(weights[selected], share)


def typical(weights: Tensor, share: Tensor) -> Tensor:
    """Weights float32 [S, V] of the typical tokens, 0 for others; share: float64 [S].

    Sorts, and does not wait for the device.
    """
    probability = weights / weights.sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    entropy = torch.special.entr(probability).sum(dim=-1, keepdim=True, dtype=torch.float64)
    # Infinite where an earlier filter removed the token.
    distance = (-probability.log() - entropy.float()).abs_()
    ascending, order = distance.sort(dim=-1)
    mass = weights.gather(1, order).cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(mass, _needed(mass[:, -1], share).unsqueeze(1))
    farthest = ascending.gather(1, last.clamp_(max=weights.shape[1] - 1))
    return weights.masked_fill(distance > farthest, 0.0)


def typical_of_row(weights: NDArray[np.float32], share: float) -> None:
    """As :func:`typical`, for one row on the host, in place."""
    tokens = np.flatnonzero(weights)
    weight = weights[tokens]
    total = float(weight.sum(dtype=np.float64))
    if not 0 < total < math.inf:
        return
    probability = weight / np.float32(total)
    surprise = -np.log(probability)
    entropy = np.float32((probability * surprise).sum(dtype=np.float64))
    distance = np.abs(surprise - entropy)
    nearest = _select(-distance, weight, max(1.0, math.ceil(total * share)))
    weights[tokens[distance > -nearest]] = 0.0


def _needed(total: Tensor, share: Tensor) -> Tensor:
    """The integer weight that reaches a share of the total; at least one."""
    return (total * share).ceil_().clamp_(min=1.0)


def _splits(count: int, vocab_size: int) -> list[slice]:
    """Slices of ``count`` rows small enough to sort in bounded memory."""
    size = max(1, MAX_SORTED // vocab_size)
    return [slice(first, first + size) for first in range(0, count, size)]


def _select(keys: NDArray[np.float32], weights: NDArray[np.float32], needed: float) -> float:
    """The highest key t such that the weights of keys >= t reach ``needed``.

    A weighted quickselect; sorting a vocabulary takes 1 to 4 ms.
    """
    while len(keys) > _SORTABLE:
        pivot = np.median(keys[:: len(keys) // 64])
        above = np.flatnonzero(keys > pivot)
        if not len(above):
            break  # the median is the maximum: too many ties to split
        mass = float(weights[above].sum(dtype=np.float64))
        if mass < needed:
            needed -= mass
            above = np.flatnonzero(keys <= pivot)
        keys, weights = keys[above], weights[above]
    order = np.argsort(-keys)
    last = int(np.searchsorted(weights[order].cumsum(dtype=np.float64), needed))
    return float(keys[order[min(last, len(keys) - 1)]])
