"""Linear layers whose weights are quantized in the checkpoint, or as they are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tgi_cli.kernels.linear import linear
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization import bitsandbytes
from tgi_cli.quantization.base import LinearWeights, QuantizationMethod, QuantizedMatmul
from tgi_cli.quantization.block_weight import BlockWeight, CodedWeight, concat_blocks, decoded
from tgi_cli.quantization.cuda_matmul import make_cuda_matmul
from tgi_cli.quantization.few_rows import FewRows
from tgi_cli.quantization.matmul import ConcatMatmul, CppMatmul, make_matmul
from tgi_cli.quantization.quantized_weight import QuantizedWeight, concat_outputs, quantize_int8
from tgi_cli.quantization.unquantized import Unquantized
from tgi_cli.quantization.widening import make_alike, widen

Quantizer = Callable[[Tensor], QuantizedWeight]
"""Quantizes a weight [out, in]."""

_Part = tuple[slice, Tensor | CodedWeight]
"""Some outputs of a layer, and their weight."""

_HEAD_FORMATS = {8: "integers of 8 bits", 4: "nf4"}


class Quantized(QuantizationMethod):
    """Collects a layer's parts as they are loaded, then makes kernel matrices of them.

    Parts with the same arrangement of codes become one matrix. Weights without a kernel are
    dequantized once, and are then treated like plain weights.

    Args:
        dtype: dtype of activations.
        device: device of the matrices.
        quantizer: applied to plain weights, or None to leave them plain.
        input_bits: 8 to round activations to 8-bit integers for products with integers, else 16.

    Attributes:
        kernels: number of matrices by kernel.
        dequantized: number of dequantized weights by reason.
        quantizes_activations: whether activations are rounded for some product.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        quantizer: Quantizer | None = None,
        input_bits: int = 16,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.quantizer = quantizer
        self.input_bits = input_bits
        self.quantizes_activations = False
        self.plain = Unquantized()
        self.kernels: Counter[str] = Counter()
        self.dequantized: Counter[str] = Counter()
        self._parts: dict[LinearWeights, list[_Part]] = {}  # of layers that are being loaded

    @property
    def experts(self) -> QuantizationMethod:
        """On a GPU experts are multiplied in groups, by fewer kernels."""
        return self if self.device.type == "cpu" else _GroupedExperts(self)

    def create_weights(
        self, layer: LinearWeights, out_features: int, in_features: int, dtype: torch.dtype
    ) -> None:
        layer.weight = None
        layer.packed = None

    def fill(self, layer: LinearWeights, rows: slice, weight: Tensor | CodedWeight) -> None:
        if isinstance(weight, Tensor):
            weight = weight.to(self.dtype, copy=True)
            if self.quantizer is not None and not layer.exempt:
                weight = _rounded(weight, self.quantizer, self.device)
        self._parts.setdefault(layer, []).append((rows, weight))

    def process_after_loading(self, layer: LinearWeights) -> None:
        parts = self._parts.pop(layer, [])
        if layer.paired:
            parts = _pairable(parts)
        parts = _merged(parts)
        paired = layer.paired and len(parts) == 1
        matrices = [
            (rows, weight if isinstance(weight, Tensor) else self._matrix(weight, paired))
            for rows, weight in parts
        ]
        parts.clear()
        dense = [matrix for _, matrix in matrices if isinstance(matrix, Tensor)]
        if len(dense) == len(matrices):
            if dense:  # else it is an output head that shares the embedding's weight
                # Some may be plain in the checkpoint, and still be in the host's memory.
                dense = [matrix.to(self.device) for matrix in dense]
                whole = dense[0] if len(dense) == 1 else torch.cat(dense)
                layer.weight = nn.Parameter(whole, requires_grad=False)
            self.plain.process_after_loading(layer)
            return
        products = [
            (rows, _PlainMatmul(self.plain, matrix, self.device))
            if isinstance(matrix, Tensor)
            else (rows, matrix)
            for rows, matrix in matrices
        ]
        only = products[0][1] if len(products) == 1 else ConcatMatmul(products)
        # A whole model can be lowered to a program of bare matrices.
        packed: Any = only.matrix_alone or only
        layer.packed = packed

    def _matrix(self, weight: CodedWeight, paired: bool) -> QuantizedMatmul | Tensor:
        matmul = make_matmul(weight, self.dtype, self.device, paired, self.input_bits)
        return self._counted(matmul, weight)

    def _counted(
        self, matmul: QuantizedMatmul | str, weight: CodedWeight
    ) -> QuantizedMatmul | Tensor:
        """The kernel's matrix, or the dense weight for a reason."""
        if isinstance(matmul, str):
            self.dequantized[matmul] += 1
            return weight.dequantize(self.dtype, self.device)
        self.kernels[matmul.kernel] += 1
        if isinstance(matmul, CppMatmul):
            self.quantizes_activations |= matmul.quantizes_activations
        return matmul

    def report(self) -> Iterator[str]:
        """Log lines about the kernels of the quantized weights."""
        for kernel, count in self.kernels.most_common():
            yield f"{count} quantized weights are computed with by {kernel}"
        for reason, count in self.dequantized.most_common():
            dtype = str(self.dtype).removeprefix("torch.")
            yield f"{count} quantized weights are dequantized to {dtype}: {reason}"

    def apply(self, layer: LinearWeights, x: Tensor, bias: Tensor | None) -> Tensor:
        packed: object = layer.packed
        if isinstance(packed, QuantizedMatmul):
            return packed(x, bias)
        if isinstance(packed, PackedMatrix):
            return linear(x, packed, bias)
        return self.plain.apply(layer, x, bias)


class _GroupedExperts(Quantized):
    """For experts whose weights are stacked, with their inputs in one order."""

    def __init__(self, whole: Quantized) -> None:
        super().__init__(whole.dtype, whole.device, whole.quantizer)
        self.kernels, self.dequantized = whole.kernels, whole.dequantized

    def _matrix(self, weight: CodedWeight, paired: bool) -> QuantizedMatmul | Tensor:
        weight = decoded(weight)
        if bool((weight.groups[1:] < weight.groups[:-1]).any()):
            return self._counted("experts have no kernel for an activation order", weight)
        widened = widen(weight)
        return self._counted(make_cuda_matmul(widened, self.dtype, self.device, True), weight)


class QuantizedHead(Quantized):
    """The output head for ``--quantize-head``; one that the checkpoint quantizes is used as it is.

    Args:
        bits: 8 (integers with a scale per output) or 4 (nf4 with a scale per 64 inputs).

    Attributes:
        is_stored: whether the checkpoint's head is quantized.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, bits: int, input_bits: int = 16
    ) -> None:
        super().__init__(dtype, device, input_bits=input_bits)
        self._bits = bits
        self._quantize: Quantizer = (
            quantize_int8 if bits == 8 else partial(bitsandbytes.quantize, "nf4")
        )
        self.is_stored = False

    def fill(self, layer: LinearWeights, rows: slice, weight: Tensor | CodedWeight) -> None:
        if isinstance(weight, CodedWeight):
            self.is_stored = True
        else:  # in one step, without a plain copy of perhaps the largest weight of all
            weight = _rounded(weight, self._quantize, self.device)
        super().fill(layer, rows, weight)

    def report(self) -> Iterator[str]:
        subject = f"the output head is in {_HEAD_FORMATS[self._bits]} (--quantize-head)"
        if self.is_stored:
            subject = "--quantize-head changes nothing: the checkpoint's output head is quantized"
        for kernel in self.kernels:
            yield f"{subject}, computed with by {kernel}"
        for reason in self.dequantized:
            dtype = str(self.dtype).removeprefix("torch.")
            yield f"{subject}, dequantized to {dtype}, which saves nothing: {reason}"


class _PlainMatmul(QuantizedMatmul):
    """An unquantized part beside a quantized one."""

    kernel = "plain"

    def __init__(self, plain: Unquantized, weight: Tensor, device: torch.device) -> None:
        self.plain = plain
        self.weight: nn.Parameter | None = nn.Parameter(weight.to(device), requires_grad=False)
        self.packed: Tensor | PackedMatrix | None = None
        self.exempt = self.paired = False
        self.few_rows: FewRows | None = None
        plain.process_after_loading(self)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.plain.apply(self, x, bias)

    @property
    def matrix_alone(self) -> PackedMatrix | None:
        return self.packed if isinstance(self.packed, PackedMatrix) else None

    @property
    def tensors(self) -> list[Tensor]:
        packed = self.packed.data if isinstance(self.packed, PackedMatrix) else self.packed
        return [each for each in (self.weight, packed) if each is not None]


def _rounded(weight: Tensor, quantizer: Quantizer, device: torch.device) -> QuantizedWeight:
    """What a quantizer makes of a weight, in the host's memory; a GPU rounds faster."""
    return quantizer(weight.to(device)).cpu()


def _pairable(parts: list[_Part]) -> list[_Part]:
    """A gate and what it gates in one format, if they are quantized in two."""
    if len(parts) != 2:
        return parts
    (first, a), (second, b) = parts
    if isinstance(a, Tensor) or isinstance(b, Tensor) or _mergeable(a, b):
        return parts
    pair = make_alike(decoded(a), decoded(b))
    return parts if pair is None else [(first, pair[0]), (second, pair[1])]


def _merged(parts: list[_Part]) -> list[_Part]:
    """Merge neighbouring parts whose weights can be concatenated."""
    parts = sorted(parts, key=lambda part: part[0].start)
    if not parts:
        return []
    borders = [at for at, (a, b) in enumerate(pairwise(parts), 1) if not _mergeable(a[1], b[1])]
    runs = [parts[first:last] for first, last in pairwise([0, *borders, len(parts)])]
    return [
        (slice(run[0][0].start, run[-1][0].stop), _concat([weight for _, weight in run]))
        for run in runs
    ]


def _mergeable(a: Tensor | CodedWeight, b: Tensor | CodedWeight) -> bool:
    if isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        return a.is_like(b)
    if isinstance(a, BlockWeight) and isinstance(b, BlockWeight):
        return a.is_like(b)
    return isinstance(a, Tensor) and isinstance(b, Tensor)


def _concat(weights: list[Tensor | CodedWeight]) -> Tensor | CodedWeight:
    if len(weights) == 1:
        return weights[0]
    if dense := [weight for weight in weights if isinstance(weight, Tensor)]:
        return torch.cat(dense)
    if blocks := [weight for weight in weights if isinstance(weight, BlockWeight)]:
        return concat_blocks(blocks)
    return concat_outputs([weight for weight in weights if isinstance(weight, QuantizedWeight)])
