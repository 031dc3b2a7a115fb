"""Interface between a linear layer and the format of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization.block_weight import CodedWeight
from tgi_cli.quantization.few_rows import FewRows


class LinearWeights(Protocol):
    """Attributes of a linear layer that a method sets and reads.

    Attributes:
        weight: the checkpoint's weight, or None if only ``packed`` is set.
        packed: the form of the weight that the kernels take, or None.
        exempt: whether plain weights are not quantized as they are loaded.
        paired: whether the outputs are a gate's and then as many that it gates.
        few_rows: how the weight is multiplied with few rows, if not as with many.
    """

    weight: nn.Parameter | None
    packed: Tensor | PackedMatrix | None
    exempt: bool
    paired: bool
    few_rows: FewRows | None


class QuantizationMethod(ABC):
    """How one format stores a linear layer's weight, and multiplies by it.

    One instance serves all layers of a model. The order of calls per layer is ``create_weights``,
    ``fill`` for each part of the weight, ``process_after_loading``, then ``apply``.
    """

    @abstractmethod
    def create_weights(
        self, layer: LinearWeights, out_features: int, in_features: int, dtype: torch.dtype
    ) -> None:
        """Register the parameters that a checkpoint fills, on the meta device."""

    def fill(self, layer: LinearWeights, rows: slice, weight: Tensor | CodedWeight) -> None:
        """Load some outputs of this shard's weight, [outputs, in_features], into ``rows``.

        ``weight`` may be in a memory-mapped file, so it is copied.
        """
        assert layer.weight is not None
        if isinstance(weight, CodedWeight):  # the layer cannot compute with it
            weight = weight.dequantize(layer.weight.dtype, layer.weight.device)
        layer.weight[rows].copy_(weight)

    @property
    def experts(self) -> QuantizationMethod:
        """The method for the experts of a mixture."""
        return self

    @abstractmethod
    def process_after_loading(self, layer: LinearWeights) -> None:
        """Bring the loaded parameters into the form that ``apply`` computes with."""

    @abstractmethod
    def apply(self, layer: LinearWeights, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in_features] times the layer's weight, plus bias: [T, out_features]."""


class QuantizedMatmul(ABC):
    """x [T, in] to [T, out]: a weight in the form that a kernel takes.

    Attributes:
        kernel: name of the kernel, for people.
    """

    kernel: str

    @property
    def matrix_alone(self) -> PackedMatrix | None:
        """The matrix of our kernels, if the product is one with it and nothing else."""
        return None

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    @property
    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """All of its tensors."""

    @property
    def nbytes(self) -> int:
        """Size of its tensors in bytes."""
        return sum(each.nbytes for each in self.tensors)
