"""Grids, rounding to nearest, and AWQ's searches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.quantization.test_algorithms_gptq import correlated, random_weight, seen
from tgi_cli.quantization import fp8
from tgi_cli.quantization.algorithms import grid
from tgi_cli.quantization.algorithms.awq import search_clip, search_scale
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.recipe import Recipe
from tgi_cli.quantization.quantized_weight import quantize_int8

PLAIN = Recipe(method="rtn", group_size=32)
FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors")


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    sym=st.booleans(),
    layout=st.sampled_from(FORMATS),
    kind=st.sampled_from(("both", "positive", "negative", "zero", "tiny", "one")),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    seed=st.integers(0, 1000),
)
def test_rounding_errors_are_at_most_half_a_step(
    bits: int, sym: bool, layout: str, kind: str, dtype: torch.dtype, seed: int
) -> None:
    recipe = replace(PLAIN, bits=bits, sym=sym, format=layout, scale_dtype=dtype)
    weights = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    if kind == "positive":
        weights = weights.abs()
    elif kind == "negative":
        weights = -weights.abs()
    elif kind == "zero":
        weights = weights * 0
    elif kind == "tiny":
        weights = weights * 1e-3
    elif kind == "one":
        weights[:, 1:] = 0
    scales, zeros = grid.find_grid(weights, recipe)
    assert bool((scales > 0).all())
    assert torch.equal(scales.to(dtype).float(), scales)
    assert bool((zeros == zeros.round()).all())
    assert zeros.min() >= (1 if layout == "gptq" else 0)
    assert zeros.max() <= 2**bits - 1
    if sym:
        assert bool((zeros == 2 ** (bits - 1)).all())
    rounded = grid.nearest(weights, recipe)
    # Half a step; at the ends as much again, since a scale and a zero are rounded themselves.
    limit = scales[:, None] * (1.0 if not sym else 0.51) + weights.abs() * 2**-7
    assert bool(((rounded - weights).abs() <= limit + 1e-12).all())
    if kind == "zero":
        assert not rounded.any()


def test_a_symmetric_grid_follows_gptqs_conventions() -> None:
    weights = torch.tensor([[-3.0, 1.0, 2.0], [0.5, 3.0, 1.0]])
    scales, zeros = grid.find_grid(weights, PLAIN)
    assert scales.tolist() == pytest.approx([0.4, 0.4], rel=1e-3)
    assert zeros.tolist() == [8, 8]


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_searched_scales_have_a_smaller_error(bits: int, sym: bool) -> None:
    weight = random_weight(64, 128)
    weight[:, ::41] *= 4
    plain = replace(PLAIN, bits=bits, sym=sym, group_size=64)
    errors = [
        float((grid.dequantize(rtn(weight, recipe)) - weight).square().sum())
        for recipe in (plain, replace(plain, mse=True))
    ]
    assert errors[1] < errors[0] * (0.85 if bits < 4 else 0.97)


@pytest.mark.parametrize("inputs", [96, 100, 20])
def test_groups_are_rounded_independently(inputs: int) -> None:
    weight = random_weight(5, inputs)
    result = rtn(weight, PLAIN)
    assert result.groups.tolist() == [i // 32 for i in range(inputs)]
    parts = [
        grid.dequantize(rtn(part.contiguous(), replace(PLAIN, group_size=-1)))
        for part in torch.split(weight, 32, dim=1)
    ]
    assert torch.equal(grid.dequantize(result), torch.cat(parts, dim=1))


def test_many_rows_are_rounded_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(50, 64)
    limits = torch.rand(50, 2) * 0.1 + 0.05
    whole = grid.dequantize(rtn(weight, PLAIN, limits=limits))
    eight = grid.dequantize(rtn(weight, INT8))
    monkeypatch.setattr(grid, "CHUNK", 64 * 7)
    assert torch.equal(grid.dequantize(rtn(weight, PLAIN, limits=limits)), whole)
    assert torch.equal(grid.dequantize(rtn(weight, INT8)), eight)


FP8 = Recipe(
    method="fp8", bits=8, group_size=-1, format="compressed-tensors", scale_dtype=torch.float32
)
INT8 = replace(FP8, method="int8")


def test_bytes_are_those_of_loading() -> None:
    weight = random_weight(24, 160)
    for recipe, quantize in ((FP8, fp8.quantize), (INT8, quantize_int8)):
        exact = quantize(weight.clone()).dequantize(torch.float32)
        torch.testing.assert_close(grid.dequantize(rtn(weight, recipe)), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_rounded_before_the_codes(recipe: Recipe, dtype: torch.dtype) -> None:
    weight = random_weight(24, 160)
    weight[3] = 0
    result = rtn(weight, replace(recipe, scale_dtype=dtype))
    assert torch.equal(result.scales.to(dtype).float(), result.scales)
    rounded = grid.dequantize(result)
    assert bool(rounded.isfinite().all())
    assert not rounded[3].any()
    steps = weight.abs() / 16 if recipe is FP8 else result.scales.T / 2
    ends = weight.abs().amax(1, keepdim=True) * 2**-8
    assert bool(((rounded - weight).abs() <= steps + ends).all())


def test_fp8_with_one_scale_for_all() -> None:
    weight = random_weight(24, 160)
    result = rtn(weight, replace(FP8, group_size=0))
    assert len(set(result.scales.flatten().tolist())) == 1
    assert bool(((grid.dequantize(result) - weight).abs() <= weight.abs() / 16 + 1e-6).all())


def lopsided() -> tuple[Tensor, Tensor]:
    """Inputs of which a few are large, and a weight."""
    x, weight = correlated(900, 128), random_weight(48, 128)
    x[:, ::19] *= 40
    return x, weight


AWQ = Recipe(method="awq", group_size=64, sym=False, format="awq")


def error(x: Tensor, weight: Tensor, rounded: Tensor) -> float:
    exact = x @ weight.T
    return float((x @ rounded.T - exact).square().mean() / exact.square().mean())


def test_scaling_reduces_the_error() -> None:
    x, weight = lopsided()
    others = [weight, random_weight(16, 128, seed=5)]
    scales = search_scale(x.bfloat16(), others, AWQ)
    assert scales.shape == (128,)
    assert bool((scales > 0).all())
    large = scales[::19].mean() / scales.mean()
    assert large > 2
    for each in others:
        plain = error(x, each, grid.dequantize(rtn(each, AWQ)))
        scaled = error(x, each, grid.dequantize(rtn(each * scales, AWQ)) / scales)
        assert scaled < plain / 2


def test_similar_inputs_are_hardly_scaled() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x[:, 7] = 0  # of no use, and no harm
    scales = search_scale(x, [random_weight(8, 64)], replace(AWQ, group_size=32))
    assert bool(scales.isfinite().all())
    assert bool((scales > 0).all())


def test_clipping_reduces_the_error() -> None:
    x = correlated(700, 100)
    weight = random_weight(24, 100)
    weight[:, ::23] *= 3
    recipe = replace(AWQ, bits=3, group_size=32, format="gptq")
    limits = search_clip(x, weight, recipe)
    padded = torch.nn.functional.pad(weight, (0, 28)).view(24, 4, 32)
    largest = padded.abs().amax(2)
    assert limits.shape == largest.shape
    assert bool((limits <= largest).all())
    assert bool((limits >= largest * 0.499).all())
    assert bool((limits < largest).any())
    clipped, plain = (rtn(weight, recipe, limits=each) for each in (limits, None))
    # Of each group by itself, which is what was searched for.
    for group in range(4):
        part = slice(32 * group, min(100, 32 * group + 32))
        sample = x[torch.linspace(0, 699, 512).long(), part]
        errors = [
            (sample @ (grid.dequantize(each)[:, part] - weight[:, part]).T).square().sum(0)
            for each in (clipped, plain)
        ]
        assert bool((errors[0] <= errors[1] * (1 + 1e-4)).all())
    assert error(x, weight, grid.dequantize(clipped)) < error(x, weight, grid.dequantize(plain))


def test_searches_accept_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = lopsided()
    scales = search_scale(x, [weight], AWQ)
    limits = search_clip(x, weight, AWQ)
    monkeypatch.setattr(grid, "CHUNK", 128 * 9)
    assert torch.equal(search_scale(x.view(3, 300, 128), [weight], AWQ), scales)
    assert torch.equal(search_clip(x.view(3, 300, 128), weight, AWQ), limits)
    hessian = seen(x / scales)
    clipped = rtn(weight * scales, AWQ, hessian, search_clip(x / scales, weight * scales, AWQ))
    assert clipped.loss < rtn(weight, AWQ, seen(x)).loss / 2
