"""Triton's products with quantized weights against dense ones. See test_triton_product.py.

On a machine with CUDA it may be run as it stands, and then tests what the compiler made.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tgi_cli.gguf.tensor_types import TENSOR_TYPES
from tgi_cli.quantization import bitsandbytes, fp8, mxfp4
from tgi_cli.quantization.cuda_matmul import TritonMatmul
from tgi_cli.quantization.gguf import LAYOUTS, read_blocks
from tgi_cli.quantization.quantized_weight import (
    QuantizedWeight,
    contiguous_groups,
    group_inputs,
    quantize_int8,
)
from tgi_cli.quantization.scaled_matmul import quantize_rows
from tgi_cli.quantization.split_inputs import counters
from tgi_cli.quantization.tiled_weight import (
    ExpertRows,
    TiledWeight,
    stack_weights,
    tile_weight,
    widened,
)
from tgi_cli.quantization.triton_product import triton_product
from tgi_cli.quantization.triton_quantize import quantize_rows as quantize_rows_kernel
from tgi_cli.quantization.widening import widen

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROUNDING = 0.12 if INTERPRETED else 0.04
"""Of e4m3, relative. The interpreter's cast loses the carry where rounding up reaches the next
power of two, which halves the number."""


def random_codes(
    outputs: int, inputs: int, bits: int, group: int, zeros: bool = False
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits * inputs + group)
    groups = contiguous_groups(inputs, group)
    shape = (outputs, int(groups.max()) + 1)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=generator) + 0.1) / 2**bits
    points = torch.randint(0, 2**bits + 1, shape, generator=generator).clamp_(max=255).float()
    return QuantizedWeight(codes, scales, points if zeros else None, groups, bits)


def e2m1(outputs: int, inputs: int, group: int, powers: bool) -> QuantizedWeight:
    weight = random_codes(outputs, inputs, 4, group)
    scales = torch.exp2((weight.scales * 100).round() - 9) if powers else weight.scales
    return replace(weight, scales=scales, table=mxfp4.table())


def plain(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))


def e4m3(outputs: int, inputs: int, group: int) -> QuantizedWeight:
    weight = random_codes(outputs, inputs, 8, group)
    codes = torch.where(weight.codes & 0x7F == 0x7F, 0, weight.codes)
    return replace(weight, codes=codes, table=fp8.table(torch.float8_e4m3fn))


WEIGHTS = {
    "int4, groups of 128": random_codes(72, 512, 4, 128),
    "int4, groups of 128 with zeros": random_codes(72, 512, 4, 128, zeros=True),
    "int4, groups of 64": random_codes(72, 512, 4, 64),
    "int4, groups of 32 with zeros": random_codes(72, 192, 4, 32, zeros=True),
    "int4, one scale a row": random_codes(72, 512, 4, 512),
    "int3": random_codes(72, 512, 3, 128),
    "int2 with zeros": random_codes(40, 128, 2, 64, zeros=True),
    "int8, one scale a row": quantize_int8(plain(72, 512)),
    "int8, one scale and zero a row": random_codes(72, 512, 8, 512, zeros=True),
    "int8, groups of 32 with zeros": random_codes(72, 96, 8, 32, zeros=True),
    "mxfp4": e2m1(72, 192, 32, powers=True),
    "e2m1, groups of 16": e2m1(72, 96, 16, powers=False),
    "fp4": bitsandbytes.quantize("fp4", plain(72, 320)),
    "nf4": bitsandbytes.quantize("nf4", plain(72, 320)),
    "e4m3, one scale a row": fp8.quantize(plain(72, 512)),
    "e4m3, blocks of 128": e4m3(72, 384, 128),
}


def tiled(weight: QuantizedWeight) -> TiledWeight:
    weight = widen(weight)
    found = tile_weight(group_inputs(weight), weight.bits, DEVICE)
    assert not isinstance(found, str), found
    return found


def check(product: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None, bits: int) -> None:
    """The product is right up to rounding it, and the weight, to so many bits."""
    exact = x.double().cpu() @ dense.double().T
    limit = (x.double().abs().cpu() @ dense.double().abs().T) * 2.0**-bits
    if bias is not None:
        exact = exact + bias.double().cpu()
    error = (product.double().cpu() - exact).abs()
    own = 2.0**-10 if product.dtype == torch.float16 else 2.0**-20
    assert product.shape == exact.shape
    assert (error <= limit + exact.abs() * own + 1e-5).all(), (error / limit).max()


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.float16), (40, torch.float32), (130, torch.float16)]
)
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_equal_those_of_the_dequantized_weight(
    name: str, dtype: torch.dtype, rows: int
) -> None:
    weight = WEIGHTS[name]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, weight.shape[1] + 8, generator=generator)[:, :-8].to(DEVICE, dtype)
    bias = torch.randn(weight.shape[0], generator=generator).to(DEVICE, dtype)
    bits = 9 if name == "nf4" else 18  # nf4's table is rounded to bfloat16
    dense = weight.dequantize(torch.float32)
    check(triton_product(x, tiled(weight), bias), x, dense, bias, bits)
    check(triton_product(x, tiled(weight), None), x, dense, None, bits)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 18), (torch.float16, 10)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_with_blocks_of_gguf(name: str, dtype: torch.dtype, bits: int) -> None:
    """In 16 bits, a code less a fraction is rounded as a dense weight would be."""
    pytest.importorskip("gguf")
    from tests.tools.gguf_files import quantized

    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    generator = np.random.default_rng(0)
    data, _ = quantized(generator.standard_normal((40, 512), np.float32), name, generator)
    weight = read_blocks(kind, (40, 512), torch.from_numpy(np.ascontiguousarray(data)).flatten())
    weight = replace(weight, scales=weight.scales / weight.scales.abs().max())
    x = torch.randn(21, 512, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    product = triton_product(x, tiled(weight), None)
    check(product, x, weight.dequantize(torch.float32), None, bits)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("name", ["e4m3, one scale a row", "e4m3, blocks of 128"])
def test_products_of_e4m3_with_e4m3(name: str, rows: int) -> None:
    """Inputs get a scale for each row and group of the weight."""
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("it does not multiply e4m3")
    weight = WEIGHTS[name]
    found = tile_weight(group_inputs(weight), 8, DEVICE, fp8_inputs=True)
    assert isinstance(found, TiledWeight)
    assert found.fp8_inputs
    x = torch.randn(rows, weight.shape[1]) * torch.rand(rows, 1) * 100
    groups = weight.scales.shape[1]
    codes, scales = quantize_rows_kernel(x.to(DEVICE), groups)
    rounded = (codes.float().view(rows, groups, -1) * scales[..., None]).flatten(1).cpu()
    assert (rounded - x).norm() < ROUNDING * x.norm()
    product = triton_product(x.to(DEVICE), found, None)
    check(product, rounded, weight.dequantize(torch.float32), None, 16)


def test_only_steps_of_e4m3_are_multiplied_in_e4m3() -> None:
    for name in ("int8, one scale a row", "int4, groups of 128"):
        found = tile_weight(group_inputs(WEIGHTS[name]), WEIGHTS[name].bits, DEVICE, True)
        assert isinstance(found, TiledWeight)
        assert not found.fp8_inputs


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mxfp4", torch.uint8), ("int4, groups of 128", torch.float32)],
)
def test_scales_keep_their_values_in_the_narrowest_dtype(name: str, dtype: torch.dtype) -> None:
    scales = tiled(WEIGHTS[name]).scales
    assert scales.dtype == dtype
    assert torch.equal(widened(scales)[0].T.cpu(), WEIGHTS[name].scales)
    halves = replace(WEIGHTS[name], scales=WEIGHTS[name].scales.half().float())
    if dtype == torch.float32:
        assert tiled(halves).scales.dtype == torch.float16


def test_four_bits_take_half_a_byte() -> None:
    weight = tiled(WEIGHTS["mxfp4"])
    assert sum(each.nbytes for each in weight.tensors) == 72 * 192 // 2 + 72 * 192 // 32


@pytest.mark.parametrize("rows", [1, 30])
def test_inputs_are_split_and_added_up_again(rows: int) -> None:
    """Launch after launch: each leaves what the next one needs."""
    for outputs in (72, 200, 72):
        weight = random_codes(outputs, 4096, 4, 128)
        x = torch.randn(rows, 4096).to(DEVICE)
        check(triton_product(x, tiled(weight), None), x, weight.dequantize(torch.float32), None, 18)
        assert not counters(x.device).any()


def test_an_activation_order_is_undone() -> None:
    weight = random_codes(48, 256, 4, 64, zeros=True)
    weight = replace(weight, groups=weight.groups[torch.randperm(256)])
    grouped = group_inputs(weight)
    assert grouped.order is not None
    found = tile_weight(grouped, 4, DEVICE)
    assert isinstance(found, TiledWeight)
    x = torch.randn(5, 256).to(DEVICE)
    product = TritonMatmul(found, grouped.order.to(DEVICE))
    check(product(x, None), x, weight.dequantize(torch.float32), None, 18)


@pytest.mark.parametrize("pairs_of_a_token", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 23, 200])
def test_rows_of_experts(tokens: int, pairs_of_a_token: int) -> None:
    """Gathered on the way in, or scattered on the way out; experts 1 and 5 get no rows."""
    weights = [replace(random_codes(40, 192, 4, 32), scales=torch.rand(40, 6)) for _ in range(6)]
    stacked = stack_weights([tiled(weight) for weight in weights])
    bias = torch.randn(6, 40).to(DEVICE)
    generator = torch.Generator().manual_seed(tokens)
    possible = torch.tensor([0, 2, 3, 4])
    chosen = torch.stack(
        [possible[torch.randperm(4, generator=generator)[:pairs_of_a_token]] for _ in range(tokens)]
        or [torch.empty(0, dtype=torch.int64)]
    ).flatten()
    order = chosen.argsort(stable=True)
    ends = torch.searchsorted(chosen[order], torch.arange(6), right=True).int()
    rows = ExpertRows(ends.to(DEVICE), order.int().to(DEVICE), shared_by=pairs_of_a_token)
    x = torch.randn(tokens, 192, generator=generator)
    dense = [weight.dequantize(torch.float32) for weight in weights]
    each = [
        dense[expert] @ x[pair // pairs_of_a_token] + bias[expert].cpu()
        for pair, expert in enumerate(chosen.tolist())
    ]
    wanted = torch.stack(each) if each else torch.empty(0, 40)
    gathered = triton_product(x.to(DEVICE), stacked, bias, rows).cpu()
    torch.testing.assert_close(gathered, wanted[order], atol=1e-4, rtol=1e-4)
    own = x[order // pairs_of_a_token].to(DEVICE)
    rows = replace(rows, shared_by=0, scattered=True)
    scattered = triton_product(own, stacked, bias, rows).cpu()
    torch.testing.assert_close(scattered, wanted, atol=1e-4, rtol=1e-4)


def test_what_no_kernel_takes_is_named() -> None:
    odd = random_codes(32, 120, 4, 8)
    assert "groups of 8" in str(tile_weight(group_inputs(odd), 4, DEVICE))
    e5m2 = replace(WEIGHTS["e4m3, blocks of 128"], table=fp8.table(torch.float8_e5m2))
    assert tile_weight(group_inputs(e5m2), 8, DEVICE) == "there is no kernel for this format"
    nan = WEIGHTS["e4m3, one scale a row"]
    nan = replace(nan, codes=nan.codes.clone().fill_(0x7F))
    assert tile_weight(group_inputs(nan), 8, DEVICE) == "there is no kernel for this format"
    broken = replace(WEIGHTS["mxfp4"], zeros=torch.ones_like(WEIGHTS["mxfp4"].scales))
    assert "zero points" in str(tile_weight(group_inputs(broken), 4, DEVICE))


@pytest.mark.parametrize("size", [100, 576, 5000])
def test_rows_are_rounded_to_e4m3(size: int) -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("it has no cast to e4m3")
    x = torch.randn(4, size).mul_(torch.tensor([[1.0], [1e-3], [300.0], [0.0]]))
    codes, scales = quantize_rows_kernel(x.to(DEVICE))
    wanted_codes, wanted_scales = quantize_rows(x)
    torch.testing.assert_close(scales.cpu(), wanted_scales)
    ours = codes.cpu().float() * scales.cpu()
    wanted = wanted_codes.float() * wanted_scales
    if INTERPRETED:  # see ROUNDING
        assert ours.isclose(wanted, rtol=0.13, atol=1e-6).float().mean() > 0.95
        assert (ours * wanted >= 0).all()  # one of them may have rounded to 0
    else:
        torch.testing.assert_close(ours, wanted, rtol=0.13, atol=1e-6)
    assert (ours - x).norm() < ROUNDING * x.norm()
