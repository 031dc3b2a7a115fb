"""Uniform grids: finding one for some weights, and rounding to nearest.

Conventions are those of GPTQ's implementations: codes from 0, a zero point among them (in a
symmetric grid the middle, 2^(bits-1)), and positive scales.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_cli.quantization import fp8
from tgi_cli.quantization.algorithms.hessian import Hessian
from tgi_cli.quantization.algorithms.recipe import QuantizationResult, Recipe
from tgi_cli.quantization.quantized_weight import QuantizedWeight

_SHRINKING = tuple(1 - step / 50 for step in range(1, 31))
"""Shares of the range that a search for the least squared error tries, besides all of it."""

_LEAST = 2.0**-24
"""Smallest scale, which float16 can represent."""

CHUNK = 1 << 22
"""Elements that are processed at a time, to bound temporary memory."""


def find_grid(
    weights: Tensor, recipe: Recipe, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find scales and zeros, float32 [n] each, for rows of ``weights`` [n, k].

    A grid includes 0 and spans the smallest to the largest element, within ``limits`` [n] if they
    are given.
    """
    low, high = weights.amin(1).clamp_(max=0.0), weights.amax(1).clamp_(min=0.0)
    if limits is not None:
        low, high = torch.maximum(low, -limits), torch.minimum(high, limits)
    scales, zeros = _span(low, high, recipe)
    if recipe.mse:
        least = _squared_error(weights, scales, zeros, recipe.bits)
        for share in _SHRINKING:
            others = _span(low * share, high * share, recipe)
            error = _squared_error(weights, *others, recipe.bits)
            better = error < least
            least = torch.where(better, error, least)
            scales = torch.where(better, others[0], scales)
            zeros = torch.where(better, others[1], zeros)
    return scales, zeros


def _span(low: Tensor, high: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The grid from ``low`` (at most 0) to ``high`` (at least 0)."""
    top = 2**recipe.bits - 1
    if recipe.sym:
        scales = stored(torch.maximum(-low, high) * 2 / top, recipe.scale_dtype)
        return scales, torch.full_like(scales, 2 ** (recipe.bits - 1))
    scales = stored((high - low) / top, recipe.scale_dtype)
    zeros = (-low / scales).round_().clamp_(0, top)
    if recipe.format == "gptq":  # zeros are stored minus 1, and readers disagree about -1
        none = zeros < 1
        wider = stored(high / (top - 1), recipe.scale_dtype)
        scales = torch.where(none, torch.maximum(scales, wider), scales)
        zeros = zeros.clamp_(min=1)
    return scales, zeros


def stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to their stored ``dtype``, as float32; 1 instead of 0."""
    scales = torch.where(scales > 0, scales, 1.0).clamp_(_LEAST, torch.finfo(dtype).max)
    return scales.to(dtype).float()


def _squared_error(weights: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    scales, zeros = scales[:, None], zeros[:, None]
    rounded = quantize(weights, scales, zeros, bits).sub_(zeros).mul_(scales)
    return rounded.sub_(weights).square_().sum(1)


def quantize(weights: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Nearest codes, in float32; shapes broadcast."""
    return (weights / scales).round_().add_(zeros).clamp_(0, 2**bits - 1)


def nearest(weights: Tensor, recipe: Recipe, limits: Tensor | None = None) -> Tensor:
    """Round rows of ``weights``, float32 [n, k], each on its grid of :func:`find_grid`."""
    scales, zeros = (each[:, None] for each in find_grid(weights, recipe, limits))
    return quantize(weights, scales, zeros, recipe.bits).sub_(zeros).mul_(scales)


def round_groups(
    weight: Tensor, recipe: Recipe, limits: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round ``weight`` [N, K], of any floating dtype, in contiguous groups.

    ``limits``: [N, G], largest magnitudes of the groups' grids.

    Returns:
        Codes uint8 [N, K], scales float32 [G, N], zeros float32 [G, N].
    """
    rows, inputs = weight.shape
    size = recipe.group(inputs)
    count = -(-inputs // size)
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, count, device=weight.device)
    zeros = torch.empty_like(scales)
    step = max(1, CHUNK // inputs)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        # Zeros appended to a short last group change nothing: every grid includes 0.
        values = pad(weight[part].float(), (0, count * size - inputs)).view(-1, size)
        bounds = None if limits is None else limits[part].reshape(-1)
        found = find_grid(values, recipe, bounds)
        chosen = quantize(values, found[0][:, None], found[1][:, None], recipe.bits)
        codes[part] = chosen.view(-1, count * size)[:, :inputs]
        scales[part], zeros[part] = (each.view(-1, count) for each in found)
    return codes, scales.T.contiguous(), zeros.T.contiguous()


def dequantize(result: QuantizationResult) -> Tensor:
    """Dequantize ``result`` to float32 [N, K], bit for bit as readers of its format do."""
    codes, table = result.codes, None
    if codes.dtype.is_floating_point:
        table = fp8.table(codes.dtype).to(codes.device)
        codes = codes.view(torch.uint8)
    zeros = None if result.zeros is None else result.zeros.T.float()
    # Without zeros, codes have 8 bits.
    weight = QuantizedWeight(codes, result.scales.T, zeros, result.groups.long(), 8, table)
    return weight.dequantize(torch.float32)


def rtn(
    weight: Tensor,
    recipe: Recipe,
    hessian: Hessian | None = None,
    limits: Tensor | None = None,
) -> QuantizationResult:
    """Round ``weight`` [N, K] to nearest on the grid of ``recipe``, or to e4m3 for fp8.

    Args:
        weight: weight of any floating dtype; not modified.
        recipe: bits, groups and format.
        hessian: Hessian of the inputs, only for the result's ``loss``.
        limits: [N, G], clipping limits of
            :func:`~tgi_cli.quantization.algorithms.awq.search_clip`.
    """
    if recipe.method in ("fp8", "int8"):
        result = _round_to_bytes(weight, recipe)
    else:
        codes, scales, zeros = round_groups(weight, recipe, limits)
        size = recipe.group(weight.shape[1])
        groups = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device) // size
        result = QuantizationResult(codes, scales, zeros.int(), groups, nan)
    if hessian is None:
        return result
    return replace(result, loss=hessian.loss(weight, dequantize(result)))


def _round_to_bytes(weight: Tensor, recipe: Recipe) -> QuantizationResult:
    """Round to 8 bits with a scale per row or per tensor: e4m3, or integers from -127 to 127.

    https://arxiv.org/abs/2209.05433
    """
    rows, inputs = weight.shape
    floating = recipe.method == "fp8"
    dtype = torch.float8_e4m3fn if floating else torch.uint8
    top = torch.finfo(dtype).max if floating else 127
    largest = weight.abs().amax(1).float()
    if recipe.group_size == 0:
        largest = largest.amax().expand(rows)
    scales = stored(largest / top, recipe.scale_dtype)
    codes = torch.empty(rows, inputs, dtype=dtype, device=weight.device)
    step = max(1, CHUNK // inputs)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = (weight[part].float() / scales[part, None]).clamp_(-top, top)
        codes[part] = values.to(dtype) if floating else values.round_().add_(128).to(dtype)
    groups = torch.zeros(inputs, dtype=torch.int32, device=weight.device)
    return QuantizationResult(codes, scales[None], None, groups, nan)
