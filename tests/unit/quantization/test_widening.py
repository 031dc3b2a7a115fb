"""Quantized weights in wider codes and smaller groups keep their values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tgi_cli.quantization import mxfp4
from tgi_cli.quantization.quantized_weight import QuantizedWeight, contiguous_groups
from tgi_cli.quantization.widening import make_alike, widen


def weight(bits: int, group: int, zeros: bool = False, table: bool = False) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits * group)
    codes = torch.randint(0, 2**bits, (6, 128), dtype=torch.uint8, generator=generator)
    scales = torch.rand(6, 128 // group, generator=generator)
    offsets = 3 * torch.rand(scales.shape, generator=generator) if zeros else None
    values = mxfp4.table() if table else None
    return QuantizedWeight(codes, scales, offsets, contiguous_groups(128, group), bits, values)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("sizes", [(4, 8), (4, 5, 6, 8), (8,)])
def test_integers_in_more_bits(bits: int, zeros: bool, sizes: tuple[int, ...]) -> None:
    given = weight(bits, 32, zeros)
    widened = widen(given, sizes)
    assert widened.bits == next(size for size in sizes if size >= bits)
    assert torch.equal(widened.dequantize(torch.float32), given.dequantize(torch.float32))


def test_a_table_keeps_its_codes() -> None:
    given = weight(4, 32, table=True)
    assert widen(given, (8,)) is given


@pytest.mark.parametrize(
    ("a", "b", "bits"),
    [
        (weight(4, 32, zeros=True), weight(8, 16), 8),
        (weight(3, 16), weight(4, 32), 4),
        (weight(5, 32), weight(2, 16, zeros=True), 5),
        (weight(6, 16), weight(5, 32), 6),
        (weight(8, 128), weight(2, 32, zeros=True), 8),
        (weight(4, 32, table=True), weight(8, 64), 8),
        (weight(4, 32, table=True), weight(4, 32), 8),
    ],
)
def test_two_formats_become_one(a: QuantizedWeight, b: QuantizedWeight, bits: int) -> None:
    pair = make_alike(a, b)
    assert pair is not None
    assert pair[0].is_like(pair[1])
    for given, made in zip((a, b), pair, strict=True):
        assert made.bits == bits
        wanted = given.dequantize(torch.float32)
        torch.testing.assert_close(made.dequantize(torch.float32), wanted, rtol=1e-6, atol=0)


def test_what_cannot_be_made_alike() -> None:
    a = weight(4, 32)
    assert make_alike(a, replace(a, groups=a.groups.flip(0))) is None
    thirds = replace(weight(4, 32, table=True), table=torch.linspace(0, 1, 16))
    assert make_alike(a, thirds) is None
    assert make_alike(a, replace(weight(8, 32), fp8_inputs=True)) is None
