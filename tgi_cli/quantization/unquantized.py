"""Weights as the checkpoint has them, in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tgi_cli.quantization.base import QuantizationMethod
from tgi_cli.quantization.packing import pack, packed_linear


class Unquantized(QuantizationMethod):
    """A dense weight [out, in]; on a CPU packed once for the kernels that can use it."""

    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype
    ) -> None:
        weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.packed = None

    def process_after_loading(self, layer: nn.Module) -> None:
        layer.packed = pack(layer.weight)
        if layer.packed is not None:
            layer.weight = None  # the packed copy is the weight now

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.packed is not None:
            return packed_linear(x, layer.packed, bias)
        return linear(x, layer.weight, bias)
