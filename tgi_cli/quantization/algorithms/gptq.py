"""GPTQ: rounds one column at a time, and compensates the error in the remaining columns.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323. Group-aware reordering: Gafni et al. 2025,
https://arxiv.org/abs/2505.14638.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_cli.quantization.algorithms import grid
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.hessian import Hessian
from tgi_cli.quantization.algorithms.recipe import QuantizationResult, Recipe

RETRIES = 3
"""Further attempts with more damping if a Hessian cannot be factored."""

_BLOCK = 128
"""Columns whose errors are collected before the columns after them are updated."""


def gptq(weight: Tensor, hessian: Hessian, recipe: Recipe) -> QuantizationResult:
    """Quantize ``weight`` [N, K] (any floating dtype, not modified) for the inputs of ``hessian``.

    Computes on the device of both and in the Hessian's dtype. If the Hessian cannot be factored,
    its damping is multiplied by ten, up to :data:`RETRIES` times. If that fails, or there were no
    inputs, or some were not finite, the weight is rounded to nearest, with a ``note`` in the
    result. Weights of inputs that were always 0 are rounded to nearest, too, as other texts may use
    them.

    Needs about five times the Hessian's memory, and seven bytes per weight.
    """
    if not hessian.count:
        return replace(rtn(weight, recipe), note="rounded to nearest: there were no inputs")
    matrix = hessian.matrix()
    importance = matrix.diagonal().clone()
    if not bool(importance.isfinite().all()):
        return replace(rtn(weight, recipe), note="rounded to nearest: inputs were not finite")
    matrix.diagonal()[importance == 0] = importance.mean().clamp(min=1e-12)
    order = _order(importance, recipe)
    flipped = order.flip(0)
    matrix = matrix[flipped][:, flipped]
    factor, percdamp = _factor(matrix, recipe.percdamp)
    del matrix
    if factor is None:
        result = rtn(weight, recipe, hessian)
        return replace(result, note="rounded to nearest: the Hessian could not be factored")

    inputs = len(order)
    groups = torch.arange(inputs, device=order.device) // recipe.group(inputs)
    if recipe.desc_act and not recipe.static_groups:  # groups of neighbours in the order
        groups = torch.empty_like(groups).index_copy_(0, order, groups)
    grids = grid.round_groups(weight, recipe)[1:] if recipe.static_groups else None
    columns = weight.T[order].to(factor.dtype).contiguous()
    codes, scales, zeros = _round(columns, factor, groups[order].tolist(), recipe, grids)
    del columns, factor
    codes = codes[order.argsort()].T.contiguous()
    note = "" if percdamp == recipe.percdamp else f"percdamp was raised to {percdamp:g}"
    result = QuantizationResult(codes, scales.float(), zeros.int(), groups.int(), 0.0, note)
    return replace(result, loss=hessian.loss(weight, grid.dequantize(result)))


def _order(importance: Tensor, recipe: Recipe) -> Tensor:
    """int64 [K]: the order in which inputs are processed, from the Hessian's diagonal."""
    inputs = len(importance)
    if recipe.desc_act:
        return importance.argsort(descending=True, stable=True)
    if not recipe.group_aware:
        return torch.arange(inputs, device=importance.device)
    size = recipe.group(inputs)
    padded = pad(importance, (0, -inputs % size), value=-1.0).view(-1, size)
    within = padded.argsort(dim=1, descending=True, stable=True)
    within += torch.arange(0, padded.numel(), size, device=within.device)[:, None]
    among = padded.amax(1).argsort(descending=True, stable=True)
    order = within[among].flatten()
    return order[order < inputs]


def _factor(flipped: Tensor, percdamp: float) -> tuple[Tensor | None, float]:
    """Factor H⁻¹ = UᵀU; return U, upper triangular or None on failure, and the damping.

    ``flipped`` is H in reverse order, LLᵀ. L in reverse order is upper triangular, and its inverse
    is U: there is no need to invert H and to factor the inverse.
    """
    mean = flipped.diagonal().mean()
    added = 0.0
    for attempt in range(RETRIES + 1):
        damping = percdamp * 10**attempt
        flipped.diagonal().add_((damping - added) * mean)
        added = damping
        lower, failed = torch.linalg.cholesky_ex(flipped)
        if not bool(failed):
            upper = lower.flip(0, 1)
            del lower
            unit = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
            factor = torch.linalg.solve_triangular(upper, unit, upper=True)
            if bool(factor.diagonal().isfinite().all()):
                return factor, damping
    return None, added


def _round(
    columns: Tensor,
    factor: Tensor,
    groups: list[int],
    recipe: Recipe,
    grids: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round ``columns`` [K, N], in processing order; they are overwritten.

    Args:
        columns: in the dtype of the computation.
        factor: see :func:`_factor`.
        groups: groups of each column; contiguous unless ``grids`` are given.
        recipe: bits, and how to find a grid.
        grids: scales and zeros [G, N]. Default: found for each group when its first column is
            processed, from its updated columns.

    Returns:
        Codes uint8 [K, N], scales [G, N], zeros [G, N].
    """
    count, rows = columns.shape
    codes = torch.empty(count, rows, dtype=torch.uint8, device=columns.device)
    if grids is None:
        scales, zeros = columns.new_empty(2, max(groups) + 1, rows).unbind(0)
        changes = [i for i in range(1, count) if groups[i] != groups[i - 1]]
    else:
        scales, zeros = grids
        changes = []
    for first, last in pairwise([0, *changes, count]):
        if grids is None:
            found = grid.find_grid(columns[first:last].T, recipe)
            scales[groups[first]], zeros[groups[first]] = found
        for start in range(first, last, _BLOCK):
            stop = min(start + _BLOCK, last)
            errors = columns.new_empty(stop - start, rows)
            local = factor[start:stop, start:stop]
            for i in range(stop - start):
                # Errors of all columns before it in the block at once.
                column = torch.addmv(columns[start + i], errors[:i].T, local[:i, i], alpha=-1)
                scale, zero = scales[groups[start + i]], zeros[groups[start + i]]
                code = grid.quantize(column, scale, zero, recipe.bits)
                codes[start + i] = code
                column -= code.sub_(zero).mul_(scale)
                torch.div(column, local[i, i], out=errors[i])
            columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return codes, scales, zeros
