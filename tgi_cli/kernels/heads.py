"""Products of heads with a small matrix each in C++, for bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.linear import Epilogue, LinearArgs, pack_bf16
from tgi_cli.kernels.packed_matrix import MatrixStruct, PackedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class HeadMatrices:
    """A matrix [out, in] per head, in panels as those of a linear layer.

    Attributes:
        packed: the matrices.
        structs: for C++, one after the other.
    """

    packed: tuple[PackedMatrix, ...]
    structs: ctypes.Array[MatrixStruct]

    @classmethod
    def pack(cls, weights: Tensor) -> HeadMatrices:
        """Pack bfloat16 [heads, out, in].

        Raises:
            RuntimeError: there are no kernels here.
        """
        packed = tuple(pack_bf16(weight) for weight in weights)
        return cls(packed, (MatrixStruct * len(packed))(*(matrix.struct for matrix in packed)))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        return sum(matrix.nbytes for matrix in self.packed)

    @property
    def heads(self) -> int:
        return len(self.packed)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structs)


def heads_linear(x: Tensor, matrices: HeadMatrices) -> Tensor:
    """Each head of x bfloat16 [T, heads, in] times its matrix: [T, heads, out].

    A row is the same to the last bit whatever rows are beside it.
    """
    library = cpp_library()
    assert library is not None
    if x.stride(2) != 1:
        x = x.contiguous()
    tokens, heads, _ = x.shape
    y = torch.empty(tokens, heads, matrices.packed[0].out, dtype=torch.bfloat16)
    call = LinearArgs(
        x.data_ptr(),
        x.stride(0),
        tokens,
        matrices.address,
        None,
        y.data_ptr(),
        y.stride(0),
        Epilogue.STORE,
        0,
        1.0,
    )
    library.tgi_heads(
        byref(call), c_int64(heads), c_int64(x.stride(1)), c_int64(y.stride(1)), threads()
    )
    return y
