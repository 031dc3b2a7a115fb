"""Packed weights and products with them in C++, for bfloat16 inputs on the CPU.

A weight is stored in panels of 32 outputs, in bfloat16 or as codes of 8 or 4 bits with scales.
Codes (integers, e4m3, or indices of a table of 16) become bfloat16 in registers, without loss.
Where there is VNNI, products with 8-bit integers are computed in integers instead: rows are
converted to 15 bits, with a smaller error than that of rounding to bfloat16, or to 8 bits if
:func:`quantize_inputs` asks for it, which 4-bit integers support as well. A row's product is the
same to the last bit whatever rows are beside it and however many threads compute.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.memory import allocate

_PANEL = 32
_LONGEST_GROUP = 512
_FORMATS = {16: 0, 8: 1, 4: 2}
"""By bits, of bfloat16 and of integers."""
_E4M3 = 3
_CHUNKS = {0: (2, 128), 1: (4, 128), 2: (8, 128), 3: (2, 64)}
"""By format, the inputs of a chunk and its bytes, as in matrix.h."""

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_python": 1,
    "gelu_new": 2,
    "gelu_fast": 2,
    "gelu_accurate": 2,
    "gelu_python_tanh": 2,
    "gelu_pytorch_tanh": 2,
    "relu": 3,
    "relu2": 4,
    "quick_gelu": 5,
    "tanh": 6,
    "sigmoid": 7,
}
"""By transformers' names, the numbers of the functions that a product can end with."""


class Epilogue(IntEnum):
    """What becomes of a product p = x W^T + bias, which is rounded to bfloat16 first."""

    STORE = 0
    """p"""
    ADD = 1
    """y + scale * p, rounded after either"""
    GATED = 2
    """activation(gate) * up, of a paired weight: [T, out / 2]"""
    ACTIVATE = 3
    """activation(p)"""
    FLOAT = 4
    """p in float32"""


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
    )


class LinearArgs(ctypes.Structure):
    """``Linear`` of cpp/matrix.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("scale", c_float),
        ("beside", c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight [out, in] in panels, which stay where they are as long as this object lives.

    Attributes:
        bits: of a number: 16 (bfloat16), 8 or 4.
        out: outputs, gate and up together if ``paired``.
        inputs: of a row.
        paired: outputs 0 to out / 2 are gates of the others and are packed beside them.
        group: inputs that share a scale; 0: all do, or there are none.
        data: uint8, the panels.
        scales: float32 [panels, groups, 32], or None for bfloat16.
        zeros: subtracted from a number before it is scaled, like ``scales``; None for zero.
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
    struct: MatrixStruct
    address: int

    @property
    def nbytes(self) -> int:
        """Of all that a product reads."""
        return sum(t.nbytes for t in (self.data, self.scales, self.zeros) if t is not None)


def pack_bf16(weight: Tensor, paired: bool = False) -> PackedMatrix:
    """Pack bfloat16 [out, in]; ``paired``: the first half of the outputs are the others' gates.

    Raises:
        RuntimeError: there are no kernels here.
    """
    assert weight.dtype == torch.bfloat16
    out, inputs = weight.shape
    if weight.stride(-1) != 1:
        weight = weight.contiguous()
    matrix = _allocate(16, out, inputs, paired)
    _library().tgi_pack_bf16(
        c_void_p(matrix.address),
        c_void_p(weight.data_ptr()),
        c_int64(weight.stride(0)),
        threads(),
    )
    return matrix


def pack_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    paired: bool = False,
    table: Tensor | None = None,
    e4m3: bool = False,
) -> PackedMatrix:
    """Pack a weight (code - zero) * scale, or the values of its codes times a scale.

    Args:
        codes: uint8 [out, in], below 2^bits.
        scales: [out, groups], used as float32.
        zeros: like ``scales``, the code of 0. Default: the middle, 2^(bits - 1).
        bits: 8 or 4.
        group: inputs that share a scale, a multiple of 32; 0: one per output.
        table: bfloat16 [16], the values of codes of 4 bits; then there are no ``zeros``.
        e4m3: codes are of 8 bits and e4m3, none of them NaN; then there are no ``zeros``.

    Raises:
        RuntimeError: there are no kernels here.
        ValueError: the kernels cannot take the group.
    """
    assert codes.dtype == torch.uint8
    assert table is None or (bits == 4 and zeros is None)
    assert not e4m3 or (bits == 8 and zeros is None)
    out, inputs = codes.shape
    if group == 0 or group >= inputs:
        group = 0 if zeros is None else _whole(inputs)
    group, repeats = _divided(group)
    groups = -(-inputs // group) if group else 1
    scales = scales.repeat_interleave(repeats, 1)[:, :groups]
    if zeros is not None:
        zeros = zeros.repeat_interleave(repeats, 1)[:, :groups] - 2 ** (bits - 1)
    if codes.stride(-1) != 1:
        codes = codes.contiguous()
    number_format = _E4M3 if e4m3 else _FORMATS[bits]
    matrix = _allocate(bits, out, inputs, paired, group, scales, zeros, table, number_format)
    _library().tgi_pack_codes(
        c_void_p(matrix.address),
        c_void_p(codes.data_ptr()),
        c_int64(codes.stride(0)),
        threads(),
    )
    return matrix


def quantize_inputs(matrix: PackedMatrix) -> bool:
    """Let products with this matrix round rows to 8-bit integers, with a scale per 64 inputs.

    Where the groups of the matrix are not a multiple of 64, a scale is for 32 inputs.

    Returns:
        False, without effect, if codes are not integers or :func:`multiplies_bytes` is false.
    """
    integers = matrix.bits < 16 and matrix.struct.format != _E4M3 and matrix.table is None
    if not (integers and multiplies_bytes()):
        return False
    matrix.struct.input_bits = 8
    return True


def multiplies_bytes() -> bool:
    """Whether the kernels for this processor multiply codes of integers as bytes."""
    library = cpp_library()
    return library is not None and bool(library.tgi_multiplies_bytes())


def unpack(matrix: PackedMatrix) -> Tensor:
    """The weight that a matrix was made of, float32 [out, in]."""
    weight = torch.empty(matrix.out, matrix.inputs)
    _library().tgi_unpack(c_void_p(matrix.address), c_void_p(weight.data_ptr()), threads())
    return weight


def rows(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Rows of the weight that a matrix in bfloat16 was made of, to the bit: int64 [T] -> [T, in].

    Raises:
        IndexError: there is no such row.
    """
    assert matrix.bits == 16
    assert not matrix.paired
    ids = ids.long().contiguous()
    count = len(ids)
    out = torch.empty(count, matrix.inputs, dtype=torch.bfloat16)
    gather = _library().tgi_rows
    gather.restype = c_int64
    wrong = gather(
        c_void_p(matrix.address),
        c_void_p(ids.data_ptr()),
        c_int64(count),
        c_void_p(out.data_ptr()),
        c_int64(matrix.inputs),
        threads(),
    )
    if wrong >= 0:
        raise IndexError(f"row {int(ids[wrong])} of a weight that has {matrix.out}")
    return out


def linear(
    x: Tensor,
    matrix: PackedMatrix,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    activation: int = 0,
    out: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The product of x bfloat16 [T, in], T may be 0, and what ``epilogue`` makes of it.

    Args:
        bias: bfloat16 [out].
        activation: one of :data:`ACTIVATIONS`.
        out: receives the result, in rows of any stride; ``ADD`` adds to it.
        scale: of what ``ADD`` adds.

    Returns:
        ``out``, or a new tensor [T, out] (``GATED``: [T, out / 2]).
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    if out is None:
        width = matrix.out // 2 if epilogue == Epilogue.GATED else matrix.out
        dtype = torch.float32 if epilogue == Epilogue.FLOAT else torch.bfloat16
        out = torch.empty(rows, width, dtype=dtype)
    call = LinearArgs(
        x.data_ptr(),
        x.stride(0),
        rows,
        matrix.address,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        epilogue,
        activation,
        scale,
    )
    _library().tgi_linear(byref(call), threads())
    return out


def _library() -> ctypes.CDLL:
    library = cpp_library()
    if library is None:
        raise RuntimeError("packed weights need the kernels, which are not compiled here")
    return library


def _whole(inputs: int) -> int:
    """The length of a single group, which may be divided anywhere."""
    return -(-inputs // _LONGEST_GROUP) * _LONGEST_GROUP


def _divided(group: int) -> tuple[int, int]:
    """A length of groups that the kernels take, and into how many of them each group falls.

    A sum over so many inputs is in registers before it is scaled.
    """
    if group == 0:
        return 0, 1
    for parts in range(1, group // 32 + 1):
        length, rest = divmod(group, parts)
        if rest == 0 and length % 32 == 0 and length <= _LONGEST_GROUP:
            return length, parts
    raise ValueError(f"groups of {group} inputs are not a multiple of 32")


def _allocate(
    bits: int,
    out: int,
    inputs: int,
    paired: bool,
    group: int = 0,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    table: Tensor | None = None,
    number_format: int = 0,
) -> PackedMatrix:
    """A matrix with memory for its numbers, uninitialized."""
    order = _order(out, paired)
    chunk, chunk_bytes = _CHUNKS[number_format]
    panels = len(order) // _PANEL
    if bits == 4:  # two alternate
        panels += panels % 2
    size = panels * -(-inputs // chunk) * chunk_bytes
    data = allocate(size)
    scales, zeros = _in_panels(scales, order), _in_panels(zeros, order)
    table = None if table is None else torch.cat((table, table)).bfloat16()
    struct = MatrixStruct(
        number_format,
        paired,
        out,
        inputs,
        group,
        data.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        None if table is None else table.data_ptr(),
        16,
    )
    address = ctypes.addressof(struct)
    return PackedMatrix(
        bits, out, inputs, paired, group, data, scales, zeros, table, struct, address
    )


def _order(out: int, paired: bool) -> Tensor:
    """Which output is where in the panels; -1: none."""
    if not paired:
        order = torch.arange(-(-out // _PANEL) * _PANEL)
        return order.masked_fill_(order >= out, -1)
    assert out % 2 == 0
    gates = torch.arange(-(-out // _PANEL) * (_PANEL // 2))
    both = torch.stack((gates, gates + out // 2)).masked_fill_(gates >= out // 2, -1)
    return both.view(2, -1, _PANEL // 2).transpose(0, 1).flatten()


def _in_panels(values: Tensor | None, order: Tensor) -> Tensor | None:
    """Values [out, groups] as float32 [panels, groups, 32]."""
    if values is None:
        return None
    padded = torch.cat((values.float(), torch.zeros(1, values.shape[1])))  # -1 is the last
    panels = padded[order].view(-1, _PANEL, values.shape[1]).transpose(1, 2)
    packed = allocate(panels.nbytes).view(torch.float32).view(panels.shape)
    return packed.copy_(panels)
