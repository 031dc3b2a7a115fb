"""Packs blocks of GGUF's types, as they are in files, for the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.linear import FORMATS
from tgi_cli.kernels.packed_matrix import PackedMatrix, allocate_coded


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How the blocks of a type are stored in panels.

    Attributes:
        number: number of the type in GGUF.
        bits: bits of a code in panels: 4, 5, 6 or 8.
        group: inputs that share a scale.
        scales: dtype of scales: float32, float16, or int8 if they are in two levels.
        minima: dtype of minima, or None if there are none.
        supergroup: inputs that share a scale of scales, if they are in two levels.
        table: bfloat16 [16], the values of codes of 4 bits; None if they are integers.
    """

    number: int
    bits: int
    group: int
    scales: torch.dtype
    minima: torch.dtype | None
    supergroup: int
    table: Tensor | None


def pack_blocks(
    form: BlockForm, parts: Sequence[Tensor], inputs: int, paired: bool = False
) -> PackedMatrix:
    """Pack a weight of more than one group per output.

    The same to the bit as :func:`tgi_cli.kernels.linear.pack_codes` with the type's codes and
    scales, but without these in memory.

    Args:
        parts: uint8 [outputs, bytes of a row], whose outputs follow each other.
        inputs: inputs of the weight.
        paired: as of :func:`tgi_cli.kernels.linear.pack_bf16`.

    Raises:
        RuntimeError: there are no kernels here.
    """
    library = cpp_library()
    if library is None:
        raise RuntimeError("packed weights need the kernels, which are not compiled here")
    assert form.group < inputs
    assert all(part.stride(1) == 1 for part in parts)
    shift = (form.supergroup // form.group).bit_length() - 1 if form.supergroup else 0
    matrix = allocate_coded(
        form.bits,
        sum(len(part) for part in parts),
        inputs,
        paired,
        form.group,
        FORMATS[form.bits],
        form.table,
        form.scales,
        form.minima,
        shift,
    )
    rows = torch.cat([part.data_ptr() + torch.arange(len(part)) * part.stride(0) for part in parts])
    library.tgi_pack_gguf(
        c_void_p(matrix.address), c_int32(form.number), c_void_p(rows.data_ptr()), threads()
    )
    return matrix
