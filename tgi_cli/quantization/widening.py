"""Quantized weights in wider codes, smaller groups or another order, with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tgi_cli.quantization.quantized_weight import QuantizedWeight, contiguous_groups

_FACTORS = (1.0, 2.0)
"""What tables are multiplied with, and scales divided by, to find whole numbers."""


def widen(weight: QuantizedWeight, sizes: Sequence[int] = (4, 8)) -> QuantizedWeight:
    """Convert integers to the smallest of ``sizes``, in bits, that has all of their values."""
    bits = min(size for size in sizes if size >= weight.bits)
    if bits == weight.bits or weight.table is not None:
        return weight
    codes = weight.codes
    if weight.zeros is None:
        codes = codes + (2 ** (bits - 1) - 2 ** (weight.bits - 1))
    return replace(weight, codes=codes, bits=bits)


def make_alike(
    a: QuantizedWeight, b: QuantizedWeight
) -> tuple[QuantizedWeight, QuantizedWeight] | None:
    """Both as integers of 4 to 8 bits in groups of one size, with the same values.

    None if their codes are no integers, or their groups not contiguous.
    """
    pair = []
    same = a.table is None and b.table is None
    bits = max(a.bits, b.bits, 4) if same else 8
    group = 0
    for each in (a, b):
        size = _group_size(each)
        integers = widen(each, (bits,)) if same else _widen_to_8_bits(each)
        if size is None or integers is None or each.fp8_inputs:
            return None
        group = min(group or size, size)
        pair.append(integers)
    if any(_group_size(each) % group for each in pair):  # type: ignore[operator]
        return None
    return _regrouped(pair[0], group), _regrouped(pair[1], group)


def _widen_to_8_bits(weight: QuantizedWeight) -> QuantizedWeight | None:
    if weight.table is None:
        return widen(weight, (8,))
    if weight.zeros is not None:
        return None
    for factor in _FACTORS:
        values = weight.table * factor
        if bool(((values == values.round()) & (values.abs() < 128)).all()):
            numbers = (values + 128).to(torch.uint8)
            codes = numbers[weight.codes.int()]
            scales = weight.scales / factor
            return replace(weight, codes=codes, scales=scales, bits=8, table=None, levels=None)
    return None


def _group_size(weight: QuantizedWeight) -> int | None:
    """Inputs of a group, if groups are contiguous and of one size."""
    inputs, groups = len(weight.groups), weight.scales.shape[1]
    if inputs % groups or not torch.equal(
        weight.groups, contiguous_groups(inputs, inputs // groups)
    ):
        return None
    return inputs // groups


def _regrouped(weight: QuantizedWeight, size: int) -> QuantizedWeight:
    """With smaller groups."""
    inputs = len(weight.groups)
    repeats = inputs // weight.scales.shape[1] // size
    zeros = None if weight.zeros is None else weight.zeros.repeat_interleave(repeats, 1)
    scales = weight.scales.repeat_interleave(repeats, 1)
    levels = weight.levels if repeats == 1 else None
    groups = contiguous_groups(inputs, size)
    return replace(weight, scales=scales, zeros=zeros, groups=groups, levels=levels)


def reorder_inputs(weight: QuantizedWeight, order: Sequence[int]) -> QuantizedWeight:
    """With equal stretches of inputs, as many as ``order`` has, in another order."""
    inputs = torch.arange(weight.shape[1]).view(len(order), -1)[list(order)].flatten()
    codes, groups = weight.codes.index_select(1, inputs), weight.groups[inputs]
    size, stretch = _group_size(weight), weight.shape[1] // len(order)
    if size is None or stretch % size:
        return replace(weight, codes=codes, groups=groups, levels=None)
    starts = groups[::size]  # whole groups change places
    zeros = None if weight.zeros is None else weight.zeros.index_select(1, starts)
    scales = weight.scales.index_select(1, starts)
    return replace(weight, codes=codes, scales=scales, zeros=zeros, levels=None)
