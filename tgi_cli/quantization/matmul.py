"""Products with quantized weights, by the kernels of a device.

Weights are never dequantized when they are used. A weight without a kernel on the device is
dequantized as it is loaded, for a reason that is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.linear import MIN_GROUP, linear, pack_codes, quantize_inputs
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization import fp8
from tgi_cli.quantization.base import QuantizedMatmul
from tgi_cli.quantization.block_weight import BlockWeight, CodedWeight, decoded
from tgi_cli.quantization.cuda_matmul import make_cuda_matmul
from tgi_cli.quantization.quantized_weight import (
    GroupedWeight,
    QuantizedWeight,
    bfloat16_table,
    group_inputs,
)
from tgi_cli.quantization.widening import widen

_TORCH_GROUPS = (256, 128, 64, 32)
"""Group sizes that torch's kernels for 4 bits support."""

_TORCH_BITS = (4, 8)
"""Sizes of integers that they support."""


_CPP_BITS = (4, 5, 6, 8)
"""Sizes of integers that our C++ kernels support."""


class CppMatmul(QuantizedMatmul):
    """Our C++ kernels for 4 to 8 bits and e4m3 on a CPU.

    Codes are exact, except for a table's rounding in :func:`bfloat16_table`. Activations are
    rounded to 8 bits where ``input_bits`` is 8 and codes are integers.
    """

    def __init__(
        self, matrix: PackedMatrix, order: Tensor | None = None, input_bits: int = 16
    ) -> None:
        form = "fp8" if matrix.is_fp8 else f"{matrix.bits} bits"
        self.kernel = f"our kernels for {form}"
        self.order = order
        self.matrix = matrix
        self.quantizes_activations = input_bits == 8 and quantize_inputs(matrix)
        if self.quantizes_activations:
            self.kernel += ", activations of 8 bits"

    @property
    def matrix_alone(self) -> PackedMatrix | None:
        return self.matrix if self.order is None else None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x if self.order is None else x.index_select(1, self.order), self.matrix, bias)

    @property
    def tensors(self) -> Sequence[Tensor]:
        matrix = self.matrix
        others = [each for each in (matrix.table, self.order) if each is not None]
        return [*matrix.tensors, *others]


class TorchInt4Matmul(QuantizedMatmul):
    """torch's kernels for 4 bits on a CPU, fed bfloat16.

    Scales are rounded to bfloat16, so that a weight is off by up to 2 ** -8 of its size.
    """

    kernel = "torch's int4"

    def __init__(self, weight: GroupedWeight) -> None:
        self.group = next(size for size in _TORCH_GROUPS if weight.group % size == 0)
        repeats = weight.group // self.group
        scales = weight.scales.repeat_interleave(repeats, dim=1)
        offsets = torch.zeros_like(scales)
        if weight.zeros is not None:
            offsets = (8 - weight.zeros.repeat_interleave(repeats, dim=1)) * scales
        both = torch.stack((scales.T, offsets.T), dim=-1).bfloat16()
        self.scales = both.contiguous()
        self.order = weight.order
        self.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
        product: Tensor = kernel(x, self.codes, self.group, self.scales)
        return product if bias is None else product.add_(bias)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.codes, self.scales, *([] if self.order is None else [self.order])]


class TorchInt8Matmul(QuantizedMatmul):
    """torch's kernels for 8 bits with a scale per output, on a CPU."""

    kernel = "torch's int8"

    def __init__(self, weight: GroupedWeight, dtype: torch.dtype) -> None:
        self.codes = weight.codes.bitwise_xor(0x80).view(torch.int8).contiguous()  # less 128
        self.scales = weight.scales[:, 0].to(dtype)
        self.order = weight.order

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        product: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.codes, self.scales)
        return product if bias is None else product.add_(bias)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.codes, self.scales, *([] if self.order is None else [self.order])]


class ConcatMatmul(QuantizedMatmul):
    """Products over one input whose outputs are concatenated."""

    def __init__(self, products: Sequence[tuple[slice, QuantizedMatmul]]) -> None:
        self.products = list(products)
        self.kernel = " and ".join(dict.fromkeys(each.kernel for _, each in products))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.cat(
            [product(x, None if bias is None else bias[rows]) for rows, product in self.products],
            dim=1,
        )

    @property
    def matrices(self) -> list[tuple[int, PackedMatrix]]:
        """First outputs and matrices of the products; empty if they are not all of our kernels."""
        found = [(rows.start, each.matrix_alone) for rows, each in self.products]
        known = [(first, matrix) for first, matrix in found if matrix is not None]
        return known if len(known) == len(found) else []

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [tensor for _, each in self.products for tensor in each.tensors]


def _pack(weight: GroupedWeight, bits: int, paired: bool) -> PackedMatrix:
    group = weight.group if weight.group < weight.codes.shape[1] else 0
    e4m3 = bits == 8 and weight.table is not None
    scales, table, levels = weight.scales, None, weight.levels if group else None
    if weight.table is not None and not e4m3:
        table, factor = bfloat16_table(weight.table)
        scales = scales / factor
        levels = levels if factor == 1.0 else None
    return pack_codes(weight.codes, scales, weight.zeros, bits, group, paired, table, e4m3, levels)


def _has_cpp_kernel(weight: QuantizedWeight) -> bool:
    """Whether our C++ kernels support the weight's table; they do not support NaN."""
    if weight.bits == 4:
        return True
    e4m3 = fp8.table(torch.float8_e4m3fn)
    return (
        weight.table is not None
        and torch.equal(weight.table.nan_to_num(), e4m3.nan_to_num())
        and not bool((weight.codes.bitwise_and(0x7F) == 0x7F).any())
    )


def make_matmul(
    weight: CodedWeight,
    dtype: torch.dtype,
    device: torch.device,
    paired: bool = False,
    input_bits: int = 16,
) -> QuantizedMatmul | str:
    """Prepare ``weight`` for a kernel of ``device``, or return the reason why there is none.

    Args:
        paired: the outputs are a gate's and then as many that it gates.
        input_bits: 8 if activations may be rounded to 8-bit integers, else 16.
    """
    if device.type == "cuda":
        return make_cuda_matmul(widen(decoded(weight)), dtype, device)
    if dtype != torch.bfloat16:
        return f"there are kernels for bfloat16, not {str(dtype).removeprefix('torch.')}"
    ours = cpp_library() is not None
    if ours and isinstance(weight, BlockWeight) and weight.can_be_packed():
        return CppMatmul(weight.pack(paired), None, input_bits)
    weight = widen(decoded(weight), _CPP_BITS if ours else _TORCH_BITS)
    if weight.table is not None and not (ours and _has_cpp_kernel(weight)):
        return "there is no kernel for this format"
    arranged = group_inputs(weight)
    outputs, inputs = weight.shape
    whole = arranged.group == inputs
    if ours and (whole or arranged.group % MIN_GROUP == 0):
        return CppMatmul(_pack(arranged, weight.bits, paired), arranged.order, input_bits)
    if weight.table is not None:
        return f"there is no kernel for groups of {arranged.group}"
    if weight.bits == 4:
        if arranged.group % 32:
            return f"there is no kernel for groups of {arranged.group}"
        if outputs % 16:
            return f"there is no kernel for {outputs} outputs"
        return _try_kernel(lambda: TorchInt4Matmul(arranged), inputs)
    middle = arranged.zeros is None or bool((arranged.zeros == 128).all())
    if not (weight.bits == 8 and whole and middle):
        return f"there is no kernel for groups of {weight.bits}-bit codes"
    return _try_kernel(lambda: TorchInt8Matmul(arranged, dtype), inputs)


def _try_kernel(make: Callable[[], QuantizedMatmul], inputs: int) -> QuantizedMatmul | str:
    """Test a kernel of torch's: not every build and device has it."""
    try:
        product = make()
        product(torch.zeros(1, inputs, dtype=torch.bfloat16), None)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"torch's kernel fails ({str(error).splitlines()[0]})"
    return product
