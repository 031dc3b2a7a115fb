"""Packed weights and products with them in C++, for bfloat16 inputs on the CPU.

A weight is stored in panels of 32 outputs, in bfloat16 or as codes of 4 to 8 bits with scales.
Codes (integers, e4m3, or indices of a table of 16) become bfloat16 in registers, without loss.
Where there is VNNI, products with 8-bit integers are computed in integers instead: rows are
converted to 15 bits, with a smaller error than that of rounding to bfloat16. Where
:func:`quantize_inputs` asks for it, rows are converted to 8 bits for integers of all widths, with
VNNI or AVX2. A row's product is the same to the last bit whatever rows are beside it and however
many threads compute.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.packed_matrix import FP8, PackedMatrix, ScaleLevels, allocate_matrix

MIN_GROUP = 16
"""Least number of inputs that may share a scale; every other number is a multiple of it."""
_LONGEST_GROUP = 512
FORMATS = {16: 0, 8: 1, 4: 2, 5: 4, 6: 5}
"""Numbers of the formats of bfloat16 and of integers, by bits."""
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
"""Numbers of the functions that a product can end with, by transformers' names."""


class Epilogue(IntEnum):
    """Operation on a product p = x W^T + bias, which is first rounded to bfloat16."""

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


def pack_bf16(weight: Tensor, paired: bool = False) -> PackedMatrix:
    """Pack bfloat16 [out, in]; ``paired``: the first half of the outputs are the others' gates.

    Raises:
        RuntimeError: there are no kernels here.
    """
    assert weight.dtype == torch.bfloat16
    out, inputs = weight.shape
    if weight.stride(-1) != 1:
        weight = weight.contiguous()
    matrix = allocate_matrix(16, out, inputs, paired)
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
    levels: ScaleLevels | None = None,
) -> PackedMatrix:
    """Pack a weight (code - zero) * scale, or the values of its codes times a scale.

    Args:
        codes: uint8 [out, in], below 2^bits.
        scales: [out, groups], used as float32.
        zeros: like ``scales``, the code of 0. Default: the middle, 2^(bits - 1).
        bits: 8, 6, 5 or 4.
        group: inputs that share a scale, a multiple of 16; 0: one per output.
        table: bfloat16 [16], the values of codes of 4 bits; then there are no ``zeros``.
        e4m3: codes are of 8 bits and e4m3, none of them NaN; then there are no ``zeros``.
        levels: levels of the scales; then ``scales`` and ``zeros`` are not read.

    Raises:
        RuntimeError: there are no kernels here.
        ValueError: the kernels cannot take the group.
    """
    assert codes.dtype == torch.uint8
    assert table is None or (bits == 4 and zeros is None)
    assert not e4m3 or (bits == 8 and zeros is None)
    out, inputs = codes.shape
    wide: Tensor | None = scales
    if levels is not None:
        wide, zeros = levels.scales, levels.minimum_scales
    else:
        if group == 0 or group >= inputs:
            group = 0 if zeros is None else _whole(inputs)
        group, repeats = _divided(group)
        groups = -(-inputs // group) if group else 1
        wide = scales.repeat_interleave(repeats, 1)[:, :groups]
        if zeros is not None:
            zeros = zeros.repeat_interleave(repeats, 1)[:, :groups] - 2 ** (bits - 1)
    if codes.stride(-1) != 1:
        codes = codes.contiguous()
    number_format = FP8 if e4m3 else FORMATS[bits]
    matrix = allocate_matrix(
        bits, out, inputs, paired, group, wide, zeros, table, number_format, levels
    )
    _library().tgi_pack_codes(
        c_void_p(matrix.address),
        c_void_p(codes.data_ptr()),
        c_int64(codes.stride(0)),
        threads(),
    )
    return matrix


def quantize_inputs(matrix: PackedMatrix) -> bool:
    """Let products with this matrix round rows to 8-bit integers, with a scale per 64 inputs.

    Where the groups of the matrix are not a multiple of 64, a scale is for 32 or 16 inputs.

    Returns:
        False, without effect, if codes are not integers or :func:`multiplies_bytes` is false.
    """
    integers = matrix.bits < 16 and not matrix.is_fp8 and matrix.table is None
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
    """Rows of the weight that a matrix was made of: int64 [T] -> bfloat16 [T, in].

    Numbers in bfloat16 are the same to the bit, those of codes are computed in float32.

    Raises:
        IndexError: there is no such row.
    """
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
    """The product of x bfloat16 [T, in], T possibly 0, with ``epilogue`` applied to it.

    Args:
        bias: bfloat16 [out].
        activation: one of :data:`ACTIVATIONS`.
        out: receives the result, in rows of any stride; ``ADD`` adds to it.
        scale: factor of what ``ADD`` adds.

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

    Sums over this many inputs are in registers before they are scaled.
    """
    if group == 0:
        return 0, 1
    for parts in range(1, group // MIN_GROUP + 1):
        length, rest = divmod(group, parts)
        if rest == 0 and length % MIN_GROUP == 0 and length <= _LONGEST_GROUP:
            return length, parts
    raise ValueError(f"groups of {group} inputs are not a multiple of {MIN_GROUP}")
