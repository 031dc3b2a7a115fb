"""The small operations of a layer in C++, for bfloat16 on the CPU.

Their results are those of a :class:`~tgi_cli.kernels.program.Program`, to the last bit: a token
must not depend on whether its step ran as a program or module by module.
"""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.linear import ACTIVATIONS


def usable(x: Tensor, weight: Tensor | None = None) -> bool:
    """Whether the operations here take ``x``, and a norm's ``weight``."""
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and (weight is None or weight.dtype in (torch.bfloat16, torch.float32))
        and cpp_library() is not None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The norm of x [.., width], or of ``residual``, to which x is added first.

    ``weight`` [width] is bfloat16 or float32; x may have any stride between its rows.
    """
    library = cpp_library()
    assert library is not None
    x, rows, width = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    library.tgi_rms_norm(
        c_void_p(x.data_ptr()),
        c_int64(x.stride(0)),
        c_void_p(y.data_ptr()),
        c_void_p(None if residual is None else residual.data_ptr()),
        c_void_p(weight.data_ptr()),
        int(weight.dtype == torch.float32),
        c_float(eps),
        c_int64(rows),
        c_int64(width),
        threads(),
    )
    return y


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """As :func:`rms_norm`; weight and bias may be of any dtype."""
    library = cpp_library()
    assert library is not None
    x, rows, width = _rows(x)
    weight = weight.float()
    bias = None if bias is None else bias.float()
    y = torch.empty(x.shape, dtype=x.dtype)
    library.tgi_layer_norm(
        c_void_p(x.data_ptr()),
        c_int64(x.stride(0)),
        c_void_p(y.data_ptr()),
        c_void_p(None if residual is None else residual.data_ptr()),
        c_void_p(weight.data_ptr()),
        c_void_p(None if bias is None else bias.data_ptr()),
        c_float(eps),
        c_int64(rows),
        c_int64(width),
        threads(),
    )
    return y


def activate(
    x: Tensor, activation: str, gated: bool = False, deviations: float | None = None
) -> Tensor:
    """``activation`` of x [T, width]; ``gated``: of its first half, times the second.

    ``deviations``: gates are sparse, as those of :func:`tgi_cli.layers.ops.sparse_gated`.
    """
    library = cpp_library()
    assert library is not None
    x, rows, width = _rows(x)
    width = width // 2 if gated else width
    y = torch.empty(rows, width, dtype=x.dtype)
    library.tgi_activate(
        c_void_p(x.data_ptr()),
        c_int64(x.stride(0)),
        c_void_p(y.data_ptr()),
        int(gated),
        ACTIVATIONS[activation],
        int(deviations is not None),
        c_float(deviations or 0.0),
        c_int64(rows),
        c_int64(width),
        threads(),
    )
    return y


def rotate_(
    heads: Tensor,
    cosines: Tensor | None,
    sines: Tensor | None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm (``weight`` [heads, head_dim]) and rotate heads [T, heads, head_dim] in place."""
    library = cpp_library()
    assert library is not None
    tokens, num_heads, dims = heads.shape
    assert heads.stride()[1:] == (dims, 1), "a token's heads are contiguous"
    library.tgi_rotate(
        c_void_p(heads.data_ptr()),
        c_int64(heads.stride(0)),
        c_void_p(None if weight is None else weight.data_ptr()),
        int(weight is not None and weight.dtype == torch.float32),
        c_float(eps),
        c_void_p(None if cosines is None else cosines.data_ptr()),
        c_void_p(None if sines is None else sines.data_ptr()),
        c_int64(0 if cosines is None else cosines.shape[-1]),
        c_int64(tokens),
        c_int64(num_heads),
        c_int64(dims),
        threads(),
    )


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """``x`` as contiguous rows, their number, and their width."""
    width = x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.reshape(-1, width).contiguous()
    return x, x.shape[0], width
