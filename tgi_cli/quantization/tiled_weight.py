"""Quantized weights in the order in which the Triton kernels read them.

A kernel multiplies by one *step* of inputs at a time: DEPTH neighbours that share a scale. A byte
of 4-bit codes holds the same input of two neighbouring steps, so that both halves of a tile of
bytes are whole tiles of codes, and nothing has to be interleaved in registers. The bytes of a tile
of outputs are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tgi_cli.quantization import fp8, mxfp4
from tgi_cli.quantization.quantized_weight import GroupedWeight, bfloat16_table

INTEGER, E2M1, E4M3, TABLE = range(4)
"""What codes stand for: integers, less a zero; floating point; entries of a table of 16."""

_DEPTHS = {4: (64, 32, 16), 8: (128, 64, 32, 16)}
"""Inputs of a step by bits, at best: 64 bytes of an output are two sectors of memory, and 16 is
the least depth of a product on tensor cores."""

_FP8_DEPTH = 32
"""The least depth of a product of e4m3 with e4m3."""


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """E weights [N, K] of one format: those of a mixture's experts, or a single one.

    Attributes:
        data: uint8 [E, K / (DEPTH * codes per byte), N, DEPTH].
        scales: [E, groups, N]: float32, float16 or bfloat16; or uint8 exponents of 2, plus 127.
        zeros: [E, groups, N], of INTEGER: uint8, or float32 if they are fractions (of minima);
            None for 2 ** (bits - 1).
        table: float32 [16], of TABLE.
        form: INTEGER, E2M1, E4M3 or TABLE.
        bits: bits of a code, 4 or 8.
        steps: steps that share a scale; 0 if all do.
        fp8_inputs: whether inputs are rounded to e4m3, with a scale for each row and group.
    """

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    table: Tensor | None
    form: int
    bits: int
    steps: int
    fp8_inputs: bool = False

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        return self.data.shape[3]

    @property
    def outputs(self) -> int:
        """N."""
        return self.data.shape[2]

    @property
    def inputs(self) -> int:
        """K."""
        return self.data.shape[1] * self.depth * (8 // self.bits)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        every = (self.data, self.scales, self.zeros, self.table)
        return [each for each in every if each is not None]

    def is_like(self, other: TiledWeight) -> bool:
        """Whether both can be stacked."""
        if (self.zeros is None) != (other.zeros is None) or self.steps != other.steps:
            return False
        if self.data.shape[1:] != other.data.shape[1:] or self.bits != other.bits:
            return False
        if self.form != other.form or self.fp8_inputs != other.fp8_inputs:
            return False
        if self.table is None or other.table is None:
            return self.table is other.table
        return torch.equal(self.table, other.table)

    def of_expert(self, index: int) -> TiledWeight:
        """One expert's weight, as a view."""
        own = slice(index, index + 1)
        zeros = None if self.zeros is None else self.zeros[own]
        return replace(self, data=self.data[own], scales=self.scales[own], zeros=zeros)


def tile_weight(
    weight: GroupedWeight, bits: int, device: torch.device, fp8_inputs: bool = False
) -> TiledWeight | str:
    """Arrange a weight of 4- or 8-bit codes on ``device``, or return why no kernel takes it.

    Exact, except that a table is rounded to bfloat16 (:func:`bfloat16_table`); what is left of a
    code less a fraction is rounded by the kernel to the dtype of its inputs. The order of
    inputs (``weight.order``) is left to the caller. With ``fp8_inputs`` inputs are rounded as well,
    if the weight is e4m3 and its groups are as wide as a step.
    """
    outputs, inputs = weight.codes.shape
    per_byte = 8 // bits
    depth = next(
        (
            depth
            for depth in _DEPTHS[bits]
            if weight.group % depth == 0 and inputs % (depth * per_byte) == 0
        ),
        None,
    )
    if depth is None:
        return f"there is no kernel for groups of {weight.group} of {inputs} inputs"
    form, table, scales = INTEGER, None, weight.scales.to(device)
    if weight.table is not None:
        form = _form_of(weight, bits)
        if form == INTEGER:
            return "there is no kernel for this format"
        if form == TABLE:
            table, factor = bfloat16_table(weight.table)
            table, scales = table.float().to(device), scales / factor
    zeros = None
    if weight.zeros is not None:
        if form != INTEGER:
            return "there is no kernel for these zero points"
        stored = torch.uint8 if _are_bytes(weight.zeros) else torch.float32
        zeros = weight.zeros.to(device, stored).T.contiguous()[None]
    # [N, blocks, codes per byte, DEPTH]
    codes = weight.codes.to(device).view(outputs, -1, per_byte, depth)
    packed = codes[:, :, 0] if bits == 8 else codes[:, :, 0] | codes[:, :, 1] << 4
    grouped = weight.group < inputs
    steps = weight.group // depth if grouped else 0
    return TiledWeight(
        packed.transpose(0, 1).contiguous()[None],
        (_narrowed(scales) if grouped else scales).T.contiguous()[None],
        zeros,
        table,
        form,
        bits,
        steps,
        fp8_inputs and form == E4M3 and steps <= 1 and depth >= _FP8_DEPTH,
    )


def stack_weights(weights: Sequence[TiledWeight]) -> TiledWeight:
    """One weight of several experts that are alike (:meth:`TiledWeight.is_like`)."""
    scales = [each.scales for each in weights]
    if any(each.dtype != scales[0].dtype for each in scales):
        scales = [widened(each) for each in scales]
    zeros = [each.zeros for each in weights if each.zeros is not None]
    return replace(
        weights[0],
        data=torch.cat([each.data for each in weights]),
        scales=torch.cat(scales),
        zeros=torch.cat(zeros) if zeros else None,
    )


def widened(scales: Tensor) -> Tensor:
    """Scales of a :class:`TiledWeight` as float32."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return scales.float()


def _form_of(weight: GroupedWeight, bits: int) -> int:
    """What the codes of a weight with a table are; INTEGER if there is no kernel for it."""
    assert weight.table is not None
    if bits == 4:
        return E2M1 if torch.equal(weight.table, mxfp4.table()) else TABLE
    e4m3 = fp8.table(torch.float8_e4m3fn)
    if not torch.equal(weight.table.nan_to_num(), e4m3.nan_to_num()):
        return INTEGER
    has_nan = bool((weight.codes.bitwise_and(0x7F) == 0x7F).any())
    return INTEGER if has_nan else E4M3


def _are_bytes(zeros: Tensor) -> bool:
    return bool(((zeros >= 0) & (zeros <= 255) & (zeros == zeros.round())).all())


def _narrowed(scales: Tensor) -> Tensor:
    """The narrowest of the scales' dtypes that holds float32 ``scales`` exactly."""
    mantissas, exponents = torch.frexp(scales)
    codes = exponents + 126
    if bool(((mantissas == 0.5) & (codes >= 0) & (codes <= 254)).all()):
        return codes.to(torch.uint8)
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Rows of a product that are sorted by the expert whose weight they are multiplied with.

    Attributes:
        ends: int32 [E]: the end of each expert's rows; they begin at its predecessor's end.
        pairs: int32 [P]: for each row the index of its pair of token and expert in [T, k].
        shared_by: pairs that read the same row of x, k; 0 if x is sorted like the rows.
        scattered: whether the product's rows are in the order of the pairs.
    """

    ends: Tensor
    pairs: Tensor
    shared_by: int = 0
    scattered: bool = False
