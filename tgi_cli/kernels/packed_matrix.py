"""Packed weights in memory: panels of 32 outputs, with their scales (kernels/cpp/matrix.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_cli.kernels.memory import allocate

FP8 = 3
"""Number of the format of e4m3."""

_PANEL = 32
_CHUNKS = {0: (2, 128), 1: (4, 128), 2: (8, 128), FP8: (2, 64), 4: (16, 320), 5: (8, 192)}
"""Inputs and bytes of a chunk by format, as in matrix.h."""


class MatrixStruct(ctypes.Structure):
    """``Matrix`` of cpp/matrix.h."""

    _fields_ = (
        ("format", c_int32),
        ("paired", c_int32),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("group", c_int64),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("table", c_void_p),
        ("input_bits", c_int32),
        ("super_shift", c_int32),
        ("scale_codes", c_void_p),
        ("minimum_codes", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class ScaleLevels:
    """Scales of groups as float16, or in two levels.

    In two levels they are small integers times scales of supergroups of 2 ** ``shift`` groups. A
    number is ``scale * code - minimum`` where there are minima; else ``scale * value``, as
    without levels.

    Attributes:
        codes: float16 or, in two levels, int8 [out, groups].
        scales: float32 [out, supergroups], or None.
        minima: float16 or uint8 [out, groups], or None.
        minimum_scales: float32 [out, supergroups], or None.
        shift: log2 of the groups of a supergroup.
    """

    codes: Tensor
    scales: Tensor | None
    minima: Tensor | None
    minimum_scales: Tensor | None
    shift: int

    def rows(self, select: Callable[[Tensor], Tensor]) -> ScaleLevels:
        """Apply ``select``, which maps tensors [out, ...] to some of their outputs."""
        scales, minima, minimum_scales = (
            None if each is None else select(each)
            for each in (self.scales, self.minima, self.minimum_scales)
        )
        return ScaleLevels(select(self.codes), scales, minima, minimum_scales, self.shift)

    def is_like(self, other: ScaleLevels) -> bool:
        """Whether the outputs of both can be concatenated."""
        same_minima = (self.minima is None) == (other.minima is None)
        same_form = self.codes.dtype == other.codes.dtype and self.shift == other.shift
        return same_minima and same_form


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight [out, in] in panels, which stay where they are as long as this object lives.

    Attributes:
        bits: bits of a number: 16 (bfloat16), 8, 6, 5 or 4.
        out: outputs, gate and up together if ``paired``.
        inputs: inputs of a row.
        paired: outputs 0 to out / 2 are gates of the others and are packed beside them.
        group: inputs that share a scale; 0: all do, or there are none.
        data: uint8, the panels.
        scales: float32 [panels, groups, 32], or None for bfloat16.
        zeros: subtracted from a number before it is scaled, like ``scales``; None for zero.
        levels: codes and minima of :class:`ScaleLevels` [panels, groups, 32]; ``scales`` and
            ``zeros`` are then those of supergroups and of their minima, or None.
        table: bfloat16 [32], the values of codes of 4 bits, twice. Default: the code less 8.
        struct: for C++; its address is :attr:`address`.
    """

    bits: int
    out: int
    inputs: int
    paired: bool
    group: int
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    table: Tensor | None
    levels: tuple[Tensor, ...]
    struct: MatrixStruct
    address: int

    @property
    def is_fp8(self) -> bool:
        """Whether numbers are e4m3."""
        return bool(self.struct.format == FP8)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that a product reads."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a product reads, except the table."""
        every = (self.data, self.scales, self.zeros, *self.levels)
        return [each for each in every if each is not None]


@dataclass(frozen=True, slots=True)
class _PanelScales:
    """Scales as a matrix has them, [panels, groups or supergroups, 32]."""

    scales: Tensor | None = None
    zeros: Tensor | None = None
    codes: Tensor | None = None
    minima: Tensor | None = None
    shift: int = 0


def allocate_matrix(
    bits: int,
    out: int,
    inputs: int,
    paired: bool,
    group: int = 0,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    table: Tensor | None = None,
    number_format: int = 0,
    levels: ScaleLevels | None = None,
) -> PackedMatrix:
    """A matrix with memory for its numbers, uninitialized."""
    order = _order(out, paired)
    panel_scales = _PanelScales(
        _in_panels(scales, order),
        _in_panels(zeros, order),
        None if levels is None else _in_panels(levels.codes, order),
        None if levels is None else _in_panels(levels.minima, order),
        0 if levels is None else levels.shift,
    )
    return _matrix(bits, out, inputs, paired, group, panel_scales, table, number_format)


def allocate_coded(
    bits: int,
    out: int,
    inputs: int,
    paired: bool,
    group: int,
    number_format: int,
    table: Tensor | None,
    codes: torch.dtype,
    minima: torch.dtype | None,
    shift: int,
) -> PackedMatrix:
    """A matrix with memory for its numbers and scales, uninitialized.

    Args:
        codes: float32 for scales without levels; else the dtype of codes of :class:`ScaleLevels`.
        minima: the dtype of its minima, or None if there are none.
        shift: log2 of the groups of a supergroup, if scales are in two levels.
    """
    panels, groups = _panels(out, paired), inputs // group
    supergroups = -(-groups // (1 << shift))

    def memory(dtype: torch.dtype | None, count: int) -> Tensor | None:
        if dtype is None:
            return None
        size = panels * count * _PANEL * dtype.itemsize
        return allocate(size).view(dtype).view(panels, count, _PANEL)

    plain, wide = codes == torch.float32, codes == torch.int8
    panel_scales = _PanelScales(
        memory(torch.float32, groups if plain else supergroups) if plain or wide else None,
        memory(torch.float32, supergroups) if wide and minima is not None else None,
        None if plain else memory(codes, groups),
        memory(minima, groups),
        shift,
    )
    return _matrix(bits, out, inputs, paired, group, panel_scales, table, number_format)


def _matrix(
    bits: int,
    out: int,
    inputs: int,
    paired: bool,
    group: int,
    scales: _PanelScales,
    table: Tensor | None,
    number_format: int,
) -> PackedMatrix:
    chunk, chunk_bytes = _CHUNKS[number_format]
    panels = _panels(out, paired)
    if bits == 4:  # two alternate
        panels += panels % 2
    size = panels * -(-inputs // chunk) * chunk_bytes
    data = allocate(size)
    table = None if table is None else torch.cat((table, table)).bfloat16()
    struct = MatrixStruct(
        number_format,
        paired,
        out,
        inputs,
        group,
        data.data_ptr(),
        _address(scales.scales),
        _address(scales.zeros),
        _address(table),
        16,
        scales.shift,
        _address(scales.codes),
        _address(scales.minima),
    )
    kept = tuple(each for each in (scales.codes, scales.minima) if each is not None)
    return PackedMatrix(
        bits,
        out,
        inputs,
        paired,
        group,
        data,
        scales.scales,
        scales.zeros,
        table,
        kept,
        struct,
        ctypes.addressof(struct),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _panels(out: int, paired: bool) -> int:
    width = _PANEL // 2 if paired else _PANEL
    return -(-(out // 2 if paired else out) // width)


def _order(out: int, paired: bool) -> Tensor:
    """Which output is where in the panels; -1: none."""
    if not paired:
        order = torch.arange(_panels(out, paired) * _PANEL)
        return order.masked_fill_(order >= out, -1)
    assert out % 2 == 0
    gates = torch.arange(_panels(out, paired) * (_PANEL // 2))
    both = torch.stack((gates, gates + out // 2)).masked_fill_(gates >= out // 2, -1)
    return both.view(2, -1, _PANEL // 2).transpose(0, 1).flatten()


def _in_panels(values: Tensor | None, order: Tensor) -> Tensor | None:
    """Values [out, groups] as float32, or as short as they are, [panels, groups, 32]."""
    if values is None:
        return None
    values = values if values.itemsize <= 2 else values.float()
    padded = torch.cat((values, values.new_zeros(1, values.shape[1])))  # -1 is the last
    panels = padded[order].view(-1, _PANEL, values.shape[1]).transpose(1, 2)
    packed = allocate(panels.nbytes).view(values.dtype).view(panels.shape)
    return packed.copy_(panels)
