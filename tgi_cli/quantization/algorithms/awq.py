"""AWQ: scales inputs so that what matters is rounded less, then clips what costs the most.

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
"""Inputs that errors are computed of; of more these are taken at even distances."""

_POWERS = tuple(step / 20 for step in range(20))
_SHRINKING = tuple(1 - step / 20 for step in range(1, 11))


def search_scale(inputs: Tensor, weights: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """float32 [K]: what to multiply the columns of ``weights`` by, and to divide their inputs by
    (in the norm or the linear layer that makes these), before rounding.

    Of mean |x| to the powers 0, 0.05, ..., 0.95 the one with the least squared error, summed over
    all outputs. 1 everywhere is among them.

    Args:
        inputs: [T, K], of any floating dtype; errors are of at most :data:`TOKENS` of them.
        weights: [N_i, K] each, of the linear layers that take these inputs.
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
    """Of the outputs for x [T, K], squared and summed, once ``weight`` times ``scales`` is
    rounded."""
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
    """float32 [N, G]: the largest magnitude to keep in each group, from that of its largest
    element down to half of it, with the least squared error of the group's share of the output.

    To be given to :func:`~tgi_cli.quantization.algorithms.grid.rtn` as ``limits``. Not for queries
    and keys: what matters of these are products, for which no single output's error stands.

    Args:
        inputs: [T, K], already divided by the scales; at most :data:`TOKENS` of them are used.
        weight: [N, K], already multiplied by them.
    """
    x = _in_groups(_some(inputs.reshape(-1, inputs.shape[-1])), recipe).transpose(0, 1)
    products = x.transpose(1, 2) @ x  # [G, k, k]: what errors of a group's weights cost
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
    """[G, n]: the squared error of each group's share of an output, of weights [G, n, k]."""
    rounded = grid.nearest(exact.flatten(0, 1), recipe, limits.flatten()).view_as(exact)
    error = rounded.sub_(exact)
    return (error @ products).mul_(error).sum(2)


def _some(inputs: Tensor) -> Tensor:
    if len(inputs) <= TOKENS:
        return inputs.float()
    places = torch.linspace(0, len(inputs) - 1, TOKENS, device=inputs.device).long()
    return inputs[places].float()


def _in_groups(rows: Tensor, recipe: Recipe) -> Tensor:
    """[n, K] as [n, G, k], with zeros behind a short last group."""
    inputs = rows.shape[1]
    size = recipe.group_size if recipe.group_size > 0 else inputs
    return pad(rows, (0, -inputs % size)).view(len(rows), -1, size)
