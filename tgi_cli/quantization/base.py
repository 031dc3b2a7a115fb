"""The seam between a linear layer and the format of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn

from tgi_cli.kernels.linear import PackedMatrix
from tgi_cli.quantization.quantized_weight import QuantizedWeight


class LinearWeights(Protocol):
    """What a method keeps on a layer: a checkpoint's weight, or a form made of it, or both."""

    weight: nn.Parameter | None
    packed: Tensor | PackedMatrix | None
    paired: bool
    """Whether the outputs are a gate's and then as many that it gates."""


class QuantizationMethod(ABC):
    """How one format keeps a linear layer's weight on the layer, and multiplies by it.

    A method has no state of its own: one instance serves all layers of a model. The order of
    calls per layer: ``create_weights``, loading, ``process_after_loading``, then ``apply``.
    """

    @abstractmethod
    def create_weights(
        self, layer: LinearWeights, out_features: int, in_features: int, dtype: torch.dtype
    ) -> None:
        """Register the parameters that a checkpoint fills, on the meta device."""

    def fill(self, layer: LinearWeights, place: slice, weight: Tensor | QuantizedWeight) -> None:
        """Take some outputs of this shard's weight, [outputs, in_features], into their place.

        ``weight`` may lie in a mapped file: what is kept of it is copied.
        """
        assert layer.weight is not None
        if isinstance(weight, QuantizedWeight):  # of a layer that is not to compute with them
            weight = weight.dequantize(layer.weight.dtype)
        layer.weight[place].copy_(weight)

    @property
    def experts(self) -> QuantizationMethod:
        """What the experts of a mixture use."""
        return self

    @abstractmethod
    def process_after_loading(self, layer: LinearWeights) -> None:
        """Bring the loaded parameters into the form that ``apply`` computes with."""

    @abstractmethod
    def apply(self, layer: LinearWeights, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in_features] times the layer's weight, plus bias: [T, out_features]."""
