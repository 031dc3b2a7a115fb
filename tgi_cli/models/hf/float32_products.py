"""Products of torch's in bfloat16 on CPUs that have no instructions for them.

Without AVX-512 torch multiplies bfloat16 element by element: a linear layer takes 7 times as long
as in float32, a convolution 40 to 50 times. Their operands are converted instead, which takes a
few percent of a product with many rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tgi_cli.quantization.unquantized import ONEDNN_DTYPES

_PRODUCTS = frozenset(
    {
        *(torch.conv1d, torch.conv2d, torch.conv3d),
        *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm),
        *(Tensor.addmm, Tensor.baddbmm),
        *(F.linear, F.bilinear, F.multi_head_attention_forward),
    }
)


class _Float32Products(TorchFunctionMode):
    """Computes products of bfloat16 in float32 and rounds them, as hardware does.

    https://docs.pytorch.org/docs/stable/notes/extending.html#extending-all-torch-api-with-modes
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func not in _PRODUCTS or not any(map(_is_bfloat16, (*args, *given.values()))):
            return func(*args, **given)
        wide = {name: _widened(value) for name, value in given.items()}
        return _rounded(func(*map(_widened, args), **wide))


def float32_products(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Compute the thread's products of torch's in float32, if those in ``dtype`` are slow."""
    slow = dtype == torch.bfloat16 and device.type == "cpu" and dtype not in ONEDNN_DTYPES
    return _Float32Products() if slow else nullcontext()


def _is_bfloat16(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_bfloat16, value))
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _widened(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_widened, value))
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
