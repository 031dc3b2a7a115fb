"""A weight as small codes with scales: what every quantized format is read into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

import torch
from torch import Tensor

_ROWS = 1 << 22
"""Numbers that are dequantized at a time: 16 MiB of float32."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] of which element (o, i) is ``(value(code) - zero) * scale``.

    A code's value is itself, or its entry in ``table``; scale and zero are those of output o and
    of the group of input i.

    Attributes:
        codes: uint8 [out, in].
        scales: float32 [out, groups].
        zeros: float32 [out, groups]; None: 0 with a table, else the middle, 2 ** (bits - 1).
        groups: int64 [in], the group of each input, in any order.
        bits: of a code that is used: 2, 3, 4 or 8.
        table: float32 [2 ** bits]; None: codes are integers.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    bits: int
    table: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight: outputs, inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def __getitem__(self, key: Any) -> QuantizedWeight:
        """Some outputs (a slice), or of these some inputs (two slices), as of a tensor."""
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        zeros = None if self.zeros is None else self.zeros[rows]
        groups = self.groups[columns]
        codes = self.codes[rows, columns]
        return QuantizedWeight(codes, self.scales[rows], zeros, groups, self.bits, self.table)

    def rows(self, pick: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """Of the outputs those that ``pick`` takes out of any tensor [out, ...]."""
        zeros = None if self.zeros is None else pick(self.zeros)
        codes, scales = pick(self.codes), pick(self.scales)
        return QuantizedWeight(codes, scales, zeros, self.groups, self.bits, self.table)

    def padded(self, rows: int) -> QuantizedWeight:
        """With outputs behind that are 0, up to ``rows``."""

        def pad(tensor: Tensor) -> Tensor:
            return torch.nn.functional.pad(tensor, (0, 0, 0, rows - len(tensor)))

        return self.rows(pad)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: computed in float32, then rounded to ``dtype``."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        if out.is_meta:
            return out
        step = max(1, _ROWS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            part = self[start : start + step]
            if part.table is None:
                values = part.codes.float()
                zeros: Tensor | float = 2.0 ** (self.bits - 1)
            else:
                values = part.table.index_select(0, part.codes.flatten().int())
                values = values.view(part.shape)
                zeros = 0.0
            if part.zeros is not None:
                zeros = part.zeros.index_select(1, self.groups)
            values = values.sub_(zeros).mul_(part.scales.index_select(1, self.groups))
            out[start : start + step].copy_(values)
        return out

    def like(self, other: QuantizedWeight) -> bool:
        """Whether the outputs of both can be kept in one weight."""
        return (
            self.bits == other.bits
            and torch.equal(self.groups, other.groups)
            and _same(self.table, other.table)
        )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def concat_outputs(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the outputs of all ``parts``, which are alike."""
    first = parts[0]
    if len(parts) == 1:
        return first
    zeros = None
    if any(part.zeros is not None for part in parts):
        middle = 0.0 if first.table is not None else 2.0 ** (first.bits - 1)
        zeros = torch.cat(
            [
                torch.full_like(part.scales, middle) if part.zeros is None else part.zeros
                for part in parts
            ]
        )
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales for part in parts])
    return QuantizedWeight(codes, scales, zeros, first.groups, first.bits, first.table)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Codes whose groups are all of one size and stand one after the other.

    Attributes:
        codes: uint8 [out, in].
        scales: float32 [out, in / group].
        zeros: likewise; None as in :class:`QuantizedWeight`.
        group: inputs that share a scale.
        order: int32 [in], which input of the layer stands where; None: as they are.
        table: as in :class:`QuantizedWeight`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None
    table: Tensor | None


def group_inputs(weight: QuantizedWeight) -> GroupedWeight:
    """Bring the inputs of each group together (they are apart after activation ordering).

    Where groups are of several sizes, as a shard's or the last can be, they are cut into pieces
    of the largest size that divides all of them.
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
    return GroupedWeight(codes, scales, zeros, size, order, weight.table)


def contiguous_groups(inputs: int, size: int) -> Tensor:
    """The groups of inputs that stand in groups of ``size``; int64 [inputs]."""
    return torch.arange(inputs).div_(size, rounding_mode="floor")


def expand_scales(
    scales: Tensor, shape: tuple[int, int], block: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """float32 [out, groups] and the inputs' groups, int64 [in], of a weight of ``shape``.

    Args:
        scales: of one element; of one per output ([out] or [out, 1]); [out, groups]; or, with a
            ``block`` of outputs and inputs, one per block.
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
    """Whether :func:`expand_scales` takes scales of such a shape."""
    outputs, inputs = shape
    if scales in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
        return True
    if len(scales) != 2:
        return False
    if block is None:
        return scales[0] == outputs and scales[1] > 0 and inputs % scales[1] == 0
    return scales == (-(-outputs // block[0]), -(-inputs // block[1])) or (
        scales == (outputs, -(-inputs // block[1]))
    )


_NUMBERS = 1 << 20
"""That are rounded at a time: 4 MiB of float32."""


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Round to whole 127ths of an output's largest element: what EETQ and bitsandbytes do, too.

    A few outputs at a time: in float32 a large vocabulary's head takes a gigabyte.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, 1, dtype=torch.float32, device=weight.device)
    step = max(1, _NUMBERS // max(1, inputs))
    for start in range(0, outputs, step):
        place = slice(start, start + step)
        part = weight[place].to(torch.float32, copy=True)
        scales[place] = part.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-12)
        codes[place] = part.div_(scales[place]).round_().add_(128)
    return QuantizedWeight(codes, scales, None, torch.zeros(inputs, dtype=torch.int64), 8)
