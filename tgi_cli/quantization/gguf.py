"""The blocks of GGUF's tensors as codes and scales, exactly.

Blocks lie within rows. A type with minima has the values ``scale * code - minimum``, which become
``(code - minimum / scale) * scale``: off by the rounding of a quotient in float32.
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tgi_cli.gguf.tensor_types import TENSOR_TYPES, TensorType
from tgi_cli.kernels.gguf_packing import BlockForm
from tgi_cli.kernels.packed_matrix import ScaleLevels
from tgi_cli.quantization import mxfp4
from tgi_cli.quantization.quantized_weight import QuantizedWeight, contiguous_groups

_ELEMENTS = 1 << 22
"""Elements whose blocks are taken apart at a time."""

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types that are no blocks."""

_Scales = Tensor | tuple[Tensor, Tensor]
"""float16 or float32 [rows, blocks, groups]; or in two levels: float32 [rows, blocks, 1], whole
numbers."""

_Parts = tuple[Tensor, _Scales, _Scales | None]
"""uint8 codes [rows, blocks, elements], scales, and minima."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the blocks of a type become codes.

    Attributes:
        group: inputs that share a scale.
        bits: bits of a code.
        decode: takes blocks uint8 [rows, blocks, bytes] apart.
        table: the values of codes; None if they are integers, less 2 ** (bits - 1) or a minimum.
        scales: dtype that scales are kept in; int8 if they are in two levels.
        minima: likewise, or None if there are none.
    """

    group: int
    bits: int
    decode: Callable[[Tensor], _Parts]
    table: Callable[[], Tensor] | None = None
    scales: torch.dtype = torch.float16
    minima: torch.dtype | None = None


def read_floats(kind: str, shape: tuple[int, ...], data: Tensor) -> Tensor:
    """A tensor of one of :data:`FLOATS`, of its bytes uint8 [size]."""
    if data.data_ptr() % FLOATS[kind].itemsize:
        data = data.clone()
    return data.view(FLOATS[kind]).view(shape)


def read_blocks(kind: TensorType, shape: tuple[int, int], data: Tensor) -> QuantizedWeight:
    """A weight [out, in] of one of :data:`LAYOUTS`, of its bytes uint8 [size]."""
    layout, (outputs, inputs) = LAYOUTS[kind.name], shape
    blocks = data.view(outputs, inputs // kind.elements, kind.size)
    out = _Collected(outputs, inputs, layout)
    step = max(1, _ELEMENTS // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        out.put(rows, *layout.decode(blocks[rows]))
    groups = contiguous_groups(inputs, layout.group)
    table = None if layout.table is None else layout.table()
    return QuantizedWeight(
        out.codes, out.scales, out.zeros, groups, layout.bits, table, levels=out.levels
    )


class _Collected:
    """Codes and scales of a weight, some rows after the others."""

    def __init__(self, outputs: int, inputs: int, layout: BlockLayout) -> None:
        self.outputs = outputs
        self.codes = torch.empty(outputs, inputs, dtype=torch.uint8)
        self.scales = torch.empty(outputs, inputs // layout.group, dtype=torch.float32)
        self.zeros: Tensor | None = None
        self.levels: ScaleLevels | None = None

    def put(
        self, rows: slice, codes: Tensor, scales: _Scales, minima: _Scales | None = None
    ) -> None:
        self.codes[rows], self.scales[rows] = codes.flatten(1), _product(scales).flatten(1)
        if isinstance(scales, tuple) or scales.dtype == torch.float16:
            parts = (*_levels(scales), *((None, None) if minima is None else _levels(minima)))
            if self.levels is None:
                self.levels = self._empty_levels(parts)
            held = self.levels
            every = (held.codes, held.scales, held.minima, held.minimum_scales)
            for whole, part in zip(every, parts, strict=True):
                if whole is not None and part is not None:
                    whole[rows] = part.flatten(1)
        if minima is not None:
            if self.zeros is None:
                self.zeros = torch.empty_like(self.scales)
            offsets = _product(minima).flatten(1)
            self.zeros[rows] = _zeros(self.codes[rows], self.scales[rows], offsets)

    def _empty_levels(self, parts: Sequence[Tensor | None]) -> ScaleLevels:
        codes, scales, minima, minimum_scales = (
            None
            if part is None
            else torch.empty(self.outputs, part.shape[1] * part.shape[2], dtype=part.dtype)
            for part in parts
        )
        assert codes is not None
        shift = 0 if scales is None else (codes.shape[1] // scales.shape[1]).bit_length() - 1
        minima = minima if minima is None or codes.dtype != torch.int8 else minima.byte()
        return ScaleLevels(codes, scales, minima, minimum_scales, shift)


def _levels(scales: _Scales) -> tuple[Tensor, Tensor | None]:
    """What is kept of a group, and of a supergroup."""
    if isinstance(scales, tuple):
        return scales[1].to(torch.int8), scales[0]
    return scales, None


def _product(scales: _Scales) -> Tensor:
    return scales[0] * scales[1] if isinstance(scales, tuple) else scales.float()


def _zeros(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """The zeros of groups with minima. A group that is constant gets the codes 0, and changes."""
    zeros = minima / scales
    constant = scales == 0
    if bool(constant.any()):
        zeros[constant] = 1.0
        scales[constant] = minima[constant]
        codes.view(len(codes), scales.shape[1], -1).masked_fill_(constant[..., None], 0)
    return zeros


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at an offset of each block, [rows, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _real(blocks: Tensor, start: int) -> Tensor:
    """The same as float32."""
    return _half(blocks, start).float()


def _fields(data: Tensor, shifts: range, mask: int, width: int) -> Tensor:
    """Fields of bytes, in stretches of ``width`` bytes: all lowest ones first, then the next."""
    by = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    fields = data.view(*data.shape[:-1], -1, 1, width).bitwise_right_shift(by).bitwise_and_(mask)
    return fields.flatten(-3)


def _nibbles(data: Tensor, width: int) -> Tensor:
    return _fields(data, range(0, 8, 4), 15, width)


def _pairs(data: Tensor, width: int) -> Tensor:
    return _fields(data, range(0, 8, 2), 3, width)


def _flags(data: Tensor, width: int) -> Tensor:
    return _fields(data, range(8), 1, width)


def _signed(data: Tensor, middle: int = 0) -> Tensor:
    """Signed bytes, or bytes whose ``middle`` is 0, as float32."""
    return (data.float() - middle) if middle else data.contiguous().view(torch.int8).float()


def _q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 4:], 16), _half(blocks, 0), -_half(blocks, 2)


def _fifth_bits(data: Tensor) -> Tensor:
    """The bits of 4 bytes, in order."""
    by = torch.arange(8, dtype=torch.uint8)
    return data[..., None].bitwise_right_shift(by).bitwise_and_(1).flatten(-2)


def _q5_0(blocks: Tensor) -> _Parts:
    high = _fifth_bits(blocks[..., 2:6])
    return _nibbles(blocks[..., 6:], 16) | high << 4, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Parts:
    high = _fifth_bits(blocks[..., 4:8])
    return _nibbles(blocks[..., 8:], 16) | high << 4, _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[..., 2:] ^ 0x80, _half(blocks, 0), None


def _q2_k(blocks: Tensor) -> _Parts:
    both = blocks[..., :16]
    scales = _real(blocks, 80), (both & 15).float()
    return _pairs(blocks[..., 16:80], 32), scales, (_real(blocks, 82), (both >> 4).float())


def _q3_k(blocks: Tensor) -> _Parts:
    packed = blocks[..., 96:108]
    scales = _nibbles(packed[..., :8], 8) | _pairs(packed[..., 8:], 4) << 4
    codes = _pairs(blocks[..., 32:96], 32) | _flags(blocks[..., :32], 32) << 2
    return codes, (_real(blocks, 108), _signed(scales, 32)), None


def _scales_of_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits each, in 12 bytes."""
    first, second, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), -1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = _scales_of_k(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16:], 32)
    return codes, (_real(blocks, 0), scales), (_real(blocks, 2), minima)


def _q5_k(blocks: Tensor) -> _Parts:
    scales, minima = _scales_of_k(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 48:], 32) | _flags(blocks[..., 16:48], 32) << 4
    return codes, (_real(blocks, 0), scales), (_real(blocks, 2), minima)


def _q6_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., :128], 64) | _pairs(blocks[..., 128:192], 32) << 4
    return codes, (_real(blocks, 208), _signed(blocks[..., 192:208])), None


def _iq4_xs(blocks: Tensor) -> _Parts:
    high = blocks[..., 2:4, None].bitwise_right_shift(torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1)
    scales = low.flatten(-2) | high.flatten(-2) << 4
    return _nibbles(blocks[..., 8:], 16), (_real(blocks, 0), _signed(scales, 32)), None


def _mxfp4(blocks: Tensor) -> _Parts:
    powers = torch.exp2(blocks[..., :1].double() - 127).float()  # in float32, the least one is 0
    return _nibbles(blocks[..., 1:], 16), powers, None


_TERNARY_MIDDLE = 2 - 1
"""What is added to codes 0 to 2, whose middle is 1, for codes of 2 bits, whose middle is 2."""


def _tq1_0(blocks: Tensor) -> _Parts:
    """Five digits of base 3 in a byte, the first one the highest; a byte is a fraction of 256."""

    def digits(data: Tensor, count: int, width: int) -> Tensor:
        powers = torch.tensor([3**each for each in range(count)], dtype=torch.uint8)[:, None]
        shifted = data.view(*data.shape[:-1], -1, 1, width) * powers  # modulo 256
        return (shifted.int() * 3).bitwise_right_shift_(8).to(torch.uint8).flatten(-3)

    parts = (
        digits(blocks[..., :32], 5, 32),
        digits(blocks[..., 32:48], 5, 16),
        digits(blocks[..., 48:52], 4, 4),
    )
    return torch.cat(parts, -1) + _TERNARY_MIDDLE, _half(blocks, 52), None


def _tq2_0(blocks: Tensor) -> _Parts:
    return _pairs(blocks[..., :64], 32) + _TERNARY_MIDDLE, _half(blocks, 64), None


@cache
def _iq4_table() -> Tensor:
    """Values of IQ4_NL's and IQ4_XS's codes: closer to each other around 0."""
    values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return torch.tensor(values, dtype=torch.float32)


_HALF, _BYTE, _INT = torch.float16, torch.uint8, torch.int8

LAYOUTS = {
    "Q4_0": BlockLayout(32, 4, _q4_0),
    "Q4_1": BlockLayout(32, 4, _q4_1, minima=_HALF),
    "Q5_0": BlockLayout(32, 5, _q5_0),
    "Q5_1": BlockLayout(32, 5, _q5_1, minima=_HALF),
    "Q8_0": BlockLayout(32, 8, _q8_0),
    "Q2_K": BlockLayout(16, 2, _q2_k, scales=_INT, minima=_BYTE),
    "Q3_K": BlockLayout(16, 3, _q3_k, scales=_INT),
    "Q4_K": BlockLayout(32, 4, _q4_k, scales=_INT, minima=_BYTE),
    "Q5_K": BlockLayout(32, 5, _q5_k, scales=_INT, minima=_BYTE),
    "Q6_K": BlockLayout(16, 6, _q6_k, scales=_INT),
    "IQ4_NL": BlockLayout(32, 4, _q4_0, _iq4_table),
    "IQ4_XS": BlockLayout(32, 4, _iq4_xs, _iq4_table, scales=_INT),
    "MXFP4": BlockLayout(32, 4, _mxfp4, mxfp4.table, scales=torch.float32),
    "TQ1_0": BlockLayout(256, 2, _tq1_0),
    "TQ2_0": BlockLayout(256, 2, _tq2_0),
}
"""By the name of the type."""


def block_form(kind: TensorType) -> BlockForm:
    """How the CPU's kernels keep the blocks of one of :data:`LAYOUTS`."""
    layout = LAYOUTS[kind.name]
    [number] = [number for number, each in TENSOR_TYPES.items() if each.name == kind.name]
    supergroup = kind.elements if layout.scales == _INT else 0
    table = None if layout.table is None else layout.table().bfloat16()
    bits = max(layout.bits, 4)
    return BlockForm(number, bits, layout.group, layout.scales, layout.minima, supergroup, table)
