"""Plain weights in the model's dtype, on a CPU packed for a kernel.

``F.linear`` reorders a weight for oneDNN on every call, or computes without. Packed once, in
microseconds on one core, weights of a 135M Llama:

======================  ==========  ============  ============  ============
weight                  dtype       1 token       4 tokens      32 tokens
======================  ==========  ============  ============  ============
[3072, 576]             bf16        372 -> 180    434 -> 193    866 -> 628
[3072, 576]             fp32        545 -> 383    738 -> 346    1683 -> 1157
[49152, 576]            bf16        5904 -> 3141  6757 -> 2880  13897 -> 9806
======================  ==========  ============  ============  ============

torch compiles to the same operators when it freezes a graph (torch/_inductor/mkldnn_ir.py).
Their names are private, so their absence must only cost speed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.linear import linear as native_linear
from tgi_cli.kernels.linear import pack_bf16
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization.base import LinearWeights, QuantizationMethod


def _can_pack(dtype: torch.dtype) -> bool:
    try:
        weight = torch.zeros(32, 32, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False  # another version of torch, or a processor without kernels for this dtype
    return True


_SPLIT = 1024
"""Inputs above which oneDNN sums up one row in another order than several, to save little:
[576, 1536] in bf16 takes 52 us of one core for one row and 61 as one of two."""

ONEDNN_DTYPES = frozenset(filter(_can_pack, (torch.float32, torch.bfloat16)))


def pack_onednn(weight: Tensor) -> Tensor | None:
    """Pack ``weight`` [out, in] for oneDNN, or return None if it cannot be packed."""
    if weight.device.type != "cpu" or weight.dtype not in ONEDNN_DTYPES:
        return None
    # Without a batch size: it would choose a layout for that size, and batches vary.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` for a weight of :func:`pack_onednn`.

    A row's result does not depend on the other rows, to the last bit.
    """
    if x.shape[0] == 1 and x.shape[1] > _SPLIT:
        return onednn_linear(x.expand(2, -1), packed, bias)[:1]
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return product


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
            layer.packed = pack_onednn(layer.weight)
        if layer.packed is not None:
            layer.weight = None  # the packed copy is the weight now

    def apply(self, layer: LinearWeights, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(layer.packed, PackedMatrix):
            return native_linear(x, layer.packed, bias)
        if layer.packed is not None:
            return onednn_linear(x, layer.packed, bias)
        assert layer.weight is not None
        if layer.few_rows is not None and layer.few_rows.takes(len(x)):
            return layer.few_rows.product(x, layer.weight, bias)
        return linear(x, layer.weight, bias)
