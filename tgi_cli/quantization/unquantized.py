"""Weights as the checkpoint has them, in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.linear import PackedMatrix, pack_bf16
from tgi_cli.kernels.linear import linear as native_linear
from tgi_cli.quantization.base import LinearWeights, QuantizationMethod
from tgi_cli.quantization.packing import pack, packed_linear


class Unquantized(QuantizationMethod):
    """A dense weight [out, in]; on a CPU packed once for the kernels that can use it."""

    def create_weights(
        self, layer: LinearWeights, out_features: int, in_features: int, dtype: torch.dtype
    ) -> None:
        weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.packed = None

    def process_after_loading(self, layer: LinearWeights) -> None:
        assert layer.weight is not None
        on_cpu = layer.weight.device.type == "cpu"
        if on_cpu and layer.weight.dtype == torch.bfloat16 and cpp_library() is not None:
            layer.packed = pack_bf16(layer.weight.detach(), paired=layer.paired)
        else:
            layer.packed = pack(layer.weight)
        if layer.packed is not None:
            layer.weight = None  # the packed copy is the weight now

    def apply(self, layer: LinearWeights, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(layer.packed, PackedMatrix):
            return native_linear(x, layer.packed, bias)
        if layer.packed is not None:
            return packed_linear(x, layer.packed, bias)
        assert layer.weight is not None
        return linear(x, layer.weight, bias)
