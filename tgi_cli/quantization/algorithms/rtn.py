"""Rounding to nearest, which needs no inputs."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import torch
from torch import Tensor

from tgi_cli.quantization.algorithms import grid
from tgi_cli.quantization.algorithms.hessian import Hessian
from tgi_cli.quantization.algorithms.recipe import Recipe, Result


def rtn(
    weight: Tensor,
    recipe: Recipe,
    hessian: Hessian | None = None,
    limits: Tensor | None = None,
) -> Result:
    """Round ``weight`` [N, K] to the grid of ``recipe``: integers, or e4m3 for the method fp8.

    Args:
        weight: of any floating dtype; it is not changed.
        hessian: of the inputs, for the result's ``loss`` alone.
        limits: [N, G], as :func:`~tgi_cli.quantization.algorithms.awq.search_clip` returns it: what
            is further from 0 is brought there.
    """
    if recipe.method in ("fp8", "int8"):
        result = _bytes(weight, recipe)
    else:
        codes, scales, zeros = grid.round_groups(weight, recipe, limits)
        size = recipe.group_size if recipe.group_size > 0 else weight.shape[1]
        groups = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device) // size
        result = Result(codes, scales, zeros.int(), groups, nan)
    if hessian is None:
        return result
    return replace(result, loss=hessian.loss(weight, grid.dequantize(result)))


def _bytes(weight: Tensor, recipe: Recipe) -> Result:
    """8 bits with a scale per row, or one for all: e4m3 (https://arxiv.org/abs/2209.05433) or
    whole numbers from -127 to 127."""
    rows, inputs = weight.shape
    floating = recipe.method == "fp8"
    dtype = torch.float8_e4m3fn if floating else torch.uint8
    top = torch.finfo(dtype).max if floating else 127
    largest = weight.abs().amax(1).float()
    if recipe.group_size == 0:
        largest = largest.amax().expand(rows)
    scales = grid.stored(largest / top, recipe.scale_dtype)
    codes = torch.empty(rows, inputs, dtype=dtype, device=weight.device)
    step = max(1, grid.CHUNK // inputs)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = (weight[part].float() / scales[part, None]).clamp_(-top, top)
        codes[part] = values.to(dtype) if floating else values.round_().add_(128).to(dtype)
    groups = torch.zeros(inputs, dtype=torch.int32, device=weight.device)
    return Result(codes, scales[None], None, groups, nan)
