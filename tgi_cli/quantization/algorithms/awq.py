"""AWQ: scales inputs so that important weights lose less to rounding, then clips outliers.

Lin et al. 2023, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_cli.quantization.algorithms import grid
from tgi_cli.quantization.algorithms.recipe import Recipe

TOKENS = 512
"""Inputs for the computation of errors; of more, evenly spaced ones are used."""

_POWERS = tuple(step / 20 for step in range(20))
_SHRINKING = tuple(1 - step / 20 for step in range(1, 11))


def search_scale(inputs: Tensor, weights: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """Search scales, float32 [K], for the columns of ``weights``.

    Before rounding, columns are multiplied by the scales, and their inputs divided (in the norm or
    linear layer that produces them). Candidates are mean |x| to the powers 0, 0.05, ..., 0.95, of
    which 0 means no scaling; the one with the least squared error of all outputs is returned.

    Args:
        inputs: [T, K], of any floating dtype; at most :data:`TOKENS` of them are used.
        weights: [N_i, K] each, of the linear layers with these inputs.
    """
    inputs = inputs.reshape(-1, inputs.shape[-1])
    magnitude = inputs.abs().mean(0, dtype=torch.float32)
    x = _some(inputs)
    best, least = torch.ones_like(magnitude), float("inf")
    for power in _POWERS:
        scales = magnitude.pow(power).clamp_(min=1e-4)
        scales /= (scales.amax() * scales.amin()).sqrt()
        error = sum(_error(x, weight, scales, recipe) for weight in weights)
        if error < least:
            best, least = scales, error
    return best


def _error(x: Tensor, weight: Tensor, scales: Tensor, recipe: Recipe) -> float:
    """Sum of squared errors of the outputs for x [T, K] after rounding ``weight * scales``."""
    total = 0.0
    inputs = weight.shape[1]
    step = max(1, grid.CHUNK // inputs)
    for start in range(0, len(weight), step):
        exact = weight[start : start + step].float() * scales
        groups = _in_groups(exact, recipe)
        rounded = grid.nearest(groups.flatten(0, 1), recipe).view(len(exact), -1)[:, :inputs]
        total += float((x @ ((rounded - exact) / scales).T).square_().sum(dtype=torch.float64))
    return total


def search_clip(inputs: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """Search clipping limits, float32 [N, G]: the largest magnitude in each group.

    Candidates are the group's largest magnitude down to half of it; the one with the least squared
    error of the group's share of the output is returned, as ``limits`` for
    :func:`~tgi_cli.quantization.algorithms.grid.rtn`. Not for queries and keys, whose outputs only
    matter as products with each other.

    Args:
        inputs: [T, K], already divided by the scales; at most :data:`TOKENS` of them are used.
        weight: [N, K], already multiplied by the scales.
    """
    x = _in_groups(_some(inputs.reshape(-1, inputs.shape[-1])), recipe).transpose(0, 1)
    products = x.transpose(1, 2) @ x  # [G, k, k]: cost of errors of a group's weights
    limits = weight.new_empty(len(weight), len(products), dtype=torch.float32)
    step = max(1, grid.CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        part = _in_groups(weight[start : start + step].float(), recipe)
        exact = part.transpose(0, 1).contiguous()  # [G, n, k]
        largest = exact.abs().amax(2)
        best, least = largest, _shares(exact, largest, products, recipe)
        for share in _SHRINKING:
            limit = largest * share
            error = _shares(exact, limit, products, recipe)
            better = error < least
            best, least = torch.where(better, limit, best), torch.where(better, error, least)
        limits[start : start + step] = best.T
    return limits


def _shares(exact: Tensor, limits: Tensor, products: Tensor, recipe: Recipe) -> Tensor:
    """[G, n]: squared error of each group's share of an output, for weights [G, n, k]."""
    rounded = grid.nearest(exact.flatten(0, 1), recipe, limits.flatten()).view_as(exact)
    error = rounded.sub_(exact)
    return (error @ products).mul_(error).sum(2)


def _some(inputs: Tensor) -> Tensor:
    if len(inputs) <= TOKENS:
        return inputs.float()
    indices = torch.linspace(0, len(inputs) - 1, TOKENS, device=inputs.device).long()
    return inputs[indices].float()


def _in_groups(rows: Tensor, recipe: Recipe) -> Tensor:
    """[n, K] as [n, G, k], with zeros appended to a short last group."""
    size = recipe.group(rows.shape[1])
    return pad(rows, (0, -rows.shape[1] % size)).view(len(rows), -1, size)
