"""A weight as small codes with scales, into which every quantized format is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from typing import Any

import torch
from torch import Tensor

from tgi_cli.kernels.packed_matrix import ScaleLevels

_DEQUANTIZED_ELEMENTS = 1 << 22
"""Elements that are dequantized at a time: 16 MiB of float32."""

QUANTIZED_ELEMENTS = 1 << 20
"""Elements that :func:`quantize_int8` rounds at a time: 4 MiB of float32."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] of which element (o, i) is ``(value(code) - zero) * scale``.

    A code's value is itself, or its entry in ``table``; scale and zero are those of output o and
    of the group of input i.

    Attributes:
        codes: uint8 [out, in].
        scales: float32 [out, groups].
        zeros: float32 [out, groups]. Default: 0 with a table, else the middle, 2 ** (bits - 1).
        groups: int64 [in], the group of each input, in any order.
        bits: bits of a code: 2, 3, 4 or 8.
        table: float32 [2 ** bits], or None if codes are integers.
        levels: the scales, and minima in place of zeros, as float16 or in two levels; or None.
        fp8_inputs: whether the checkpoint asks for inputs that are rounded to e4m3; kernels for
            CPUs do not.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    bits: int
    table: Tensor | None = None
    fp8_inputs: bool = False
    levels: ScaleLevels | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def default_zero(self) -> float:
        """The zero where ``zeros`` is None."""
        return 0.0 if self.table is not None else 2.0 ** (self.bits - 1)

    def __getitem__(self, key: Any) -> QuantizedWeight:
        """Slice outputs (one slice), or outputs and inputs (two slices), as of a tensor."""
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        sliced = self.rows(lambda tensor: tensor[rows])
        codes = sliced.codes[:, columns]
        whole = codes.shape[1] == self.shape[1]
        levels = sliced.levels if whole else None
        return replace(sliced, codes=codes, groups=self.groups[columns], levels=levels)

    def rows(self, select: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """Apply ``select``, which maps tensors [out, ...] to some of their outputs."""
        zeros = None if self.zeros is None else select(self.zeros)
        levels = None if self.levels is None else self.levels.rows(select)
        codes, scales = select(self.codes), select(self.scales)
        return replace(self, codes=codes, scales=scales, zeros=zeros, levels=levels)

    def padded(self, rows: int) -> QuantizedWeight:
        """Append outputs of 0, up to ``rows``."""
        return self.rows(
            lambda tensor: torch.nn.functional.pad(tensor, (0, 0, 0, rows - len(tensor)))
        )

    def dequantize(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """[out, in]: computed in float32, then rounded to ``dtype``; some outputs at a time.

        Args:
            dtype: of the result.
            device: computes it. Default: that of the codes.
        """
        if device is None or self.codes.is_meta:
            device = self.codes.device
        out = torch.empty(self.shape, dtype=dtype, device=device)
        if out.is_meta:
            return out
        groups, table = self.groups.to(device), self.table
        table = None if table is None else table.to(device)
        step = max(1, _DEQUANTIZED_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            part = self[start : start + step]
            codes, scales = part.codes.to(device), part.scales.to(device)
            if table is None:
                values = codes.float()
            else:
                values = table.index_select(0, codes.flatten().int()).view(part.shape)
            zeros: Tensor | float = self.default_zero
            if part.zeros is not None:
                zeros = part.zeros.to(device).index_select(1, groups)
            values = values.sub_(zeros).mul_(scales.index_select(1, groups))
            out[start : start + step].copy_(values)
        return out

    def cpu(self) -> QuantizedWeight:
        """The same with codes and scales in the host's memory, where groups and table are."""
        zeros = None if self.zeros is None else self.zeros.cpu()
        return replace(self, codes=self.codes.cpu(), scales=self.scales.cpu(), zeros=zeros)

    def is_like(self, other: QuantizedWeight) -> bool:
        """Whether the outputs of both can be concatenated."""
        if self.bits != other.bits or self.fp8_inputs != other.fp8_inputs:
            return False
        if not torch.equal(self.groups, other.groups):
            return False
        if self.table is None or other.table is None:
            return self.table is other.table
        return torch.equal(self.table.nan_to_num(), other.table.nan_to_num())


def concat_outputs(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the outputs of ``parts``, which are alike."""
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [
                torch.full_like(part.scales, part.default_zero)
                if part.zeros is None
                else part.zeros
                for part in parts
            ]
        )
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales for part in parts])
    levels = _concat_levels([part.levels for part in parts])
    return replace(parts[0], codes=codes, scales=scales, zeros=zeros, levels=levels)


def _concat_levels(parts: Sequence[ScaleLevels | None]) -> ScaleLevels | None:
    """None unless all of them have levels, and of one form."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or not all(found[0].is_like(part) for part in found):
        return None

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [each for each in tensors if each is not None]
        return torch.cat(present) if present else None

    return ScaleLevels(
        torch.cat([part.codes for part in found]),
        joined([part.scales for part in found]),
        joined([part.minima for part in found]),
        joined([part.minimum_scales for part in found]),
        found[0].shift,
    )


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Codes whose groups are contiguous and all of one size.

    Attributes:
        codes: uint8 [out, in].
        scales: float32 [out, in / group].
        zeros: likewise, or None as in :class:`QuantizedWeight`.
        group: inputs that share a scale.
        order: int32 [in], the layer's input for each column, or None for the original order.
        table: as in :class:`QuantizedWeight`.
        levels: likewise.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None
    table: Tensor | None
    levels: ScaleLevels | None = None


def group_inputs(weight: QuantizedWeight) -> GroupedWeight:
    """Sort inputs by their groups (which activation ordering scatters).

    Groups of several sizes, such as a shard's or the last, are split into pieces of the largest
    size that divides all of them.
    """
    groups, order = weight.groups, None
    if bool((groups[1:] < groups[:-1]).any()):
        order = torch.argsort(groups, stable=True)
        groups = groups[order]
    changes = (torch.nonzero(groups[1:] != groups[:-1]).flatten() + 1).tolist()
    size = reduce(gcd, changes, len(groups))
    starts = groups[::size]
    codes = weight.codes if order is None else weight.codes.index_select(1, order)
    scales = weight.scales.index_select(1, starts)
    zeros = None if weight.zeros is None else weight.zeros.index_select(1, starts)
    order = None if order is None else order.int()
    levels = weight.levels
    if levels is not None and (order is not None or levels.codes.shape[1] != scales.shape[1]):
        levels = None
    return GroupedWeight(codes, scales, zeros, size, order, weight.table, levels)


def contiguous_groups(inputs: int, size: int) -> Tensor:
    """The groups of inputs in contiguous groups of ``size``; int64 [inputs]."""
    return torch.arange(inputs).div_(size, rounding_mode="floor")


def expand_scales(
    scales: Tensor, shape: tuple[int, int], block: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Expand scales of a weight of ``shape`` to float32 [out, groups] and int64 groups [in].

    Args:
        scales: one element; one per output ([out] or [out, 1]); [out, groups]; or, with a ``block``
            of outputs and inputs, one per block.
    """
    outputs, inputs = shape
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1).contiguous(), torch.zeros(inputs).long()
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.shape[0] != outputs:
        assert block is not None
        scales = scales.repeat_interleave(block[0], 0)[:outputs]
    size = -(-inputs // scales.shape[1]) if block is None else block[1]
    return scales, contiguous_groups(inputs, size)


def can_expand_scales(
    scales: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None = None
) -> bool:
    """Whether :func:`expand_scales` accepts scales of this shape."""
    outputs, inputs = shape
    if scales in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
        return True
    if len(scales) != 2:
        return False
    if block is None:
        return scales[0] == outputs and scales[1] > 0 and inputs % scales[1] == 0
    return scales[1] == -(-inputs // block[1]) and scales[0] in (-(-outputs // block[0]), outputs)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Round to multiples of 1/127 of an output's largest element, as EETQ and bitsandbytes do.

    A few outputs at a time, since in float32 a large vocabulary's head takes a gigabyte.
    https://arxiv.org/abs/2208.07339
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, 1, dtype=torch.float32, device=weight.device)
    step = max(1, QUANTIZED_ELEMENTS // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        part = weight[rows].to(torch.float32, copy=True)
        scales[rows] = part.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-12)
        codes[rows] = part.div_(scales[rows]).round_().add_(128)
    return QuantizedWeight(codes, scales, None, torch.zeros(inputs, dtype=torch.int64), 8)


def bfloat16_table(table: Tensor) -> tuple[Tensor, float]:
    """Scale a table and round it to bfloat16; return it, and the factor with the least error.

    Scales are divided by the factor. fp4 becomes exact (times 1.5 its values are multiples of 1/8),
    and the error of nf4 a third smaller.
    """
    factors = torch.arange(1024, 2048) / 1024
    tables = factors[:, None] * table.float()
    error = (tables.bfloat16().float() - tables).square().sum(1) / factors.square()
    best = int(error.argmin())
    return tables[best].bfloat16(), float(factors[best])
