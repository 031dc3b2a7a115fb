"""Weights in the blocked layout of oneDNN's matrix kernels.

``F.linear`` brings a weight into that layout on every call. Doing it once makes a bf16 product
with one token 1.5 to 3.7 times as fast (weight [3072, 576]: 214 us -> 139; a head of
[49152, 576]: 7.1 ms -> 1.9; two threads). fp32 and fp16 gain nothing that lasts: MKL reads a
plain fp32 weight at the speed of memory.

torch compiles to the same operators when it freezes a graph (torch/_inductor/mkldnn_ir.py);
their names are private, so their absence only costs speed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _can_pack() -> bool:
    try:
        weight = torch.zeros(32, 32, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False  # another torch, or a processor that oneDNN has no bf16 kernel for
    return True


_CAN_PACK = _can_pack()


def pack(weight: Tensor) -> Tensor | None:
    """``weight`` [out, in] in packed layout; None where plain is as good or all there is."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _CAN_PACK:
        return None
    # No batch size is given: it would choose a layout for it alone, and batches vary.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """What ``F.linear`` computes, for a weight that ``pack`` returned."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return product
