"""Linear layers whose weights come quantized, or are quantized as they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from tgi_cli.kernels.linear import PackedMatrix, linear
from tgi_cli.quantization.base import LinearWeights, QuantizationMethod
from tgi_cli.quantization.matmul import ConcatMatmul, CppMatmul, QuantizedMatmul, make_matmul
from tgi_cli.quantization.quantized_weight import QuantizedWeight, concat_outputs, quantize_int8
from tgi_cli.quantization.unquantized import Unquantized

Quantizer = Callable[[Tensor], QuantizedWeight]
"""From a weight [out, in] to its codes."""


class _Pieces(Protocol):
    """What the method keeps on a layer while it is loaded."""

    weight: nn.Parameter | None
    packed: object
    pieces: list[tuple[slice, Tensor | QuantizedWeight]]
    exempt: bool
    paired: bool


class Quantized(QuantizationMethod):
    """Keeps a layer's parts as they come, and when all are there makes products of them.

    Parts with the same arrangement of codes become one product. What no kernel computes with is
    dequantized, once, and is then treated like plain weights; as are parts that are plain.

    Args:
        dtype: of activations.
        device: where the products are computed.
        quantizer: what makes codes of plain weights; None: these remain.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantizer: Quantizer | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.quantizer = quantizer
        self.plain = Unquantized()
        self.kernels: Counter[str] = Counter()
        """Products by what computes them."""
        self.dequantized: Counter[str] = Counter()
        """Weights that were dequantized, by the reason."""

    @property
    def experts(self) -> QuantizationMethod:
        """On a GPU experts are multiplied in groups, for which there are dense kernels alone."""
        return self if self.device.type == "cpu" else self.plain

    def create_weights(
        self, layer: LinearWeights, out_features: int, in_features: int, dtype: torch.dtype
    ) -> None:
        layer.weight = None
        layer.packed = None
        cast(_Pieces, layer).pieces = []

    def fill(self, layer: LinearWeights, place: slice, weight: Tensor | QuantizedWeight) -> None:
        kept = cast(_Pieces, layer)
        if isinstance(weight, Tensor):
            weight = weight.to(self.dtype, copy=True)
            if self.quantizer is not None and not kept.exempt:
                weight = self.quantizer(weight)
        kept.pieces.append((place, weight))

    def process_after_loading(self, layer: LinearWeights) -> None:
        kept = cast(_Pieces, layer)
        pieces, kept.pieces = _joined(kept.pieces), []
        paired = kept.paired and len(pieces) == 1
        products = [
            (place, piece if isinstance(piece, Tensor) else self._product(piece, paired))
            for place, piece in pieces
        ]
        pieces.clear()
        dense = [piece for _, piece in products if isinstance(piece, Tensor)]
        if len(dense) == len(products):
            if dense:  # else it is a head's, which its table has filled
                whole = dense[0] if len(dense) == 1 else torch.cat(dense)
                layer.weight = nn.Parameter(whole.to(self.device), requires_grad=False)
            self.plain.process_after_loading(layer)
            return
        made = [
            (
                place,
                piece
                if isinstance(piece, QuantizedMatmul)
                else _PlainMatmul(self.plain, piece, self.device),
            )
            for place, piece in products
        ]
        only = made[0][1] if len(made) == 1 else ConcatMatmul(made)
        # A plain matrix is what a whole model can be lowered to.
        kept.packed = only.matrix if isinstance(only, CppMatmul) and only.order is None else only

    def _product(self, weight: QuantizedWeight, paired: bool) -> QuantizedMatmul | Tensor:
        product = make_matmul(weight, self.dtype, self.device, paired)
        if isinstance(product, str):
            self.dequantized[product] += 1
            return weight.dequantize(self.dtype)
        self.kernels[product.kernel] += 1
        return product

    def report(self) -> Iterator[str]:
        """What became of the quantized weights, for people."""
        for kernel, count in self.kernels.most_common():
            yield f"{count} quantized weights are computed with by {kernel}"
        for reason, count in self.dequantized.most_common():
            kept = str(self.dtype).removeprefix("torch.")
            yield f"{count} quantized weights are kept in {kept}: {reason}"

    def apply(self, layer: LinearWeights, x: Tensor, bias: Tensor | None) -> Tensor:
        packed: object = layer.packed
        if isinstance(packed, QuantizedMatmul):
            return packed(x, bias)
        if isinstance(packed, PackedMatrix):
            return linear(x, packed, bias)
        return self.plain.apply(layer, x, bias)


class _PlainMatmul(QuantizedMatmul):
    """A part that is not quantized beside one that is."""

    kernel = "plain"

    def __init__(self, plain: Unquantized, weight: Tensor, device: torch.device) -> None:
        self.plain = plain
        self.weight: nn.Parameter | None = nn.Parameter(weight.to(device), requires_grad=False)
        self.packed: Tensor | PackedMatrix | None = None
        self.paired = False
        plain.process_after_loading(self)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.plain.apply(self, x, bias)

    @property
    def tensors(self) -> list[Tensor]:
        packed = self.packed.data if isinstance(self.packed, PackedMatrix) else self.packed
        return [each for each in (self.weight, packed) if each is not None]


def _joined(
    pieces: list[tuple[slice, Tensor | QuantizedWeight]],
) -> list[tuple[slice, Tensor | QuantizedWeight]]:
    """Neighbours in one, where they can be."""
    runs: list[list[tuple[slice, Tensor | QuantizedWeight]]] = []
    for place, piece in sorted(pieces, key=lambda each: each[0].start):
        last = runs[-1][-1][1] if runs else None
        if last is not None and _alike(last, piece):
            runs[-1].append((place, piece))
        else:
            runs.append([(place, piece)])
    return [(slice(run[0][0].start, run[-1][0].stop), _one([p for _, p in run])) for run in runs]


def _alike(a: Tensor | QuantizedWeight, b: Tensor | QuantizedWeight) -> bool:
    if isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        return a.like(b)
    return isinstance(a, Tensor) and isinstance(b, Tensor)


def _one(pieces: list[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    coded = [piece for piece in pieces if isinstance(piece, QuantizedWeight)]
    if coded:
        return concat_outputs(coded)
    dense = [piece for piece in pieces if isinstance(piece, Tensor)]
    return dense[0] if len(dense) == 1 else torch.cat(dense)


class QuantizedHead(Quantized):
    """What ``--quantize-head`` makes of the head: 8 bits with a scale per output.

    A head that the checkpoint has in codes stays in them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.is_stored = False
        """Whether the checkpoint has it in codes."""

    def fill(self, layer: LinearWeights, place: slice, weight: Tensor | QuantizedWeight) -> None:
        if isinstance(weight, QuantizedWeight):
            self.is_stored = True
        else:  # in one step, without a plain copy of what may be the largest weight of all
            weight = quantize_int8(weight)
        super().fill(layer, place, weight)

    def report(self) -> Iterator[str]:
        what = "the output head is in integers of 8 bits (--quantize-head)"
        if self.is_stored:
            what = "--quantize-head changes nothing: the checkpoint has a quantized output head"
        for kernel in self.kernels:
            yield f"{what}, computed with by {kernel}"
        for reason in self.dequantized:
            kept = str(self.dtype).removeprefix("torch.")
            yield f"{what}, kept in {kept}, which saves nothing: {reason}"
