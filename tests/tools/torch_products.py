"""Notices products in bfloat16 that torch computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset(
    {"linear", "matmul", "einsum", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm"}
    | {"conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose2d"}
)


class BFloat16Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of bfloat16 tensors with numbers, of this thread, within a ``with`` block.

    Attention as a whole (``scaled_dot_product_attention``) is not among them: it is about as fast
    in bfloat16 as in float32 on every CPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, tuple[int, ...]]] = []
        """Names, and shapes of the last operands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        tensors += [each for group in args if isinstance(group, list) for each in group]
        rounded = [x for x in tensors if isinstance(x, Tensor) and x.dtype == torch.bfloat16]
        name = func.overloadpacket.__name__
        if name in _PRODUCTS and rounded and not any(each.is_meta for each in rounded):
            self.found.append((name, tuple(rounded[-1].shape)))
        return func(*args, **(kwargs or {}))
