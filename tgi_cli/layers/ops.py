"""The small operations of a layer: a torch reference each, and the choice of kernels.

On CUDA that is Triton's (:mod:`tgi_cli.layers.triton_ops`) where it can compile here, for bfloat16
on a CPU the one in C++ (:mod:`tgi_cli.kernels.elementwise`) where it was compiled, else the
reference below. References compute in float32 and round once, and the result of a row does not
depend on the rows beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional as F

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.kernels import custom_kernels_enabled, elementwise, recurrence

log = logging.getLogger(__name__)


@cache
def triton_kernels() -> ModuleType | None:
    """The kernels for CUDA; looked up once, at the first operation."""
    if not custom_kernels_enabled():
        return None
    try:
        from tgi_cli.layers import triton_ops
    except ImportError:
        return None
    try:
        triton_ops.probe()
    # Triton compiles on the machine that runs it. What can be missing there is a C compiler,
    # Python's headers, an assembler, support for the GPU: each has an error class of its own.
    except Exception as error:
        log.warning("Triton cannot compile here, torch's operations are used: %s", error)
        return None
    return triton_ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    https://arxiv.org/abs/1910.07467. ``weight`` [size], or [heads, size] for x [T, heads, size],
    may be of a wider dtype than x, whose dtype the result has.
    """
    if x.is_cuda and (kernels := triton_kernels()):
        normed: Tensor = kernels.rms_norm(x, weight, eps)
        return normed
    if x.dim() <= 2 and elementwise.usable(x, weight):
        return elementwise.rms_norm(x, weight, eps)
    # F.rms_norm is seven operations on a CPU, some of them on a mixture of dtypes: of
    # [2048, 576] in bfloat16 it makes 0.9 ms, this 0.45.
    wide = x.float()
    scale = vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    scale.add_(eps).rsqrt_()
    normed = wide * scale if wide is x else wide.mul_(scale)
    return normed.mul_(weight).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum; ``residual`` is overwritten by it."""
    if residual is None:
        return rms_norm(x, weight, eps), x
    if x.is_cuda and (kernels := triton_kernels()):
        return kernels.add_rms_norm(x, residual, weight, eps), residual
    if elementwise.usable(x, weight):
        return elementwise.rms_norm(x, weight, eps, residual), residual
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    https://arxiv.org/abs/1607.06450
    """
    if elementwise.usable(x) and x.dim() == 2:
        return elementwise.layer_norm(x, weight, bias, eps)
    # torch's is one kernel on CUDA, so there is none of Triton's.
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As :func:`add_rms_norm`."""
    if residual is None:
        return layer_norm(x, weight, bias, eps), x
    if x.is_cuda and (kernels := triton_kernels()):
        return kernels.add_layer_norm(x, residual, weight, bias, eps), residual
    if elementwise.usable(x):
        return elementwise.layer_norm(x, weight, bias, eps, residual), residual
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps), residual


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * x).mul_(x)


_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": _relu2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}
"""Activations by transformers' names, of which one function may have several. Out of place."""


def activate(x: Tensor, activation: str) -> Tensor:
    """``activation`` of every element."""
    if x.dim() == 2 and elementwise.usable(x):
        return elementwise.activate(x, activation)
    return ACTIVATIONS[activation](x)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of [.., 2 I], gate first: [.., I] (https://arxiv.org/abs/2002.05202)."""
    if gate_up.is_cuda and (kernels := triton_kernels()):
        product: Tensor = kernels.gated(gate_up, activation)
        return product
    if gate_up.dim() == 2 and elementwise.usable(gate_up):
        return elementwise.activate(gate_up, activation, gated=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def sparse_gated(
    gate_up: Tensor, activation: str, deviations: float, shard: Shard = ALONE
) -> Tensor:
    """:func:`gated` [T, 2 I], of gates that are cut off below: [T, I] (Gemma 3n).

    What a token's gates, of all shards, are on average, and so many of their standard deviations,
    is taken off each of them; those that come out negative count as zero.
    """
    if shard.size == 1 and elementwise.usable(gate_up):
        return elementwise.activate(gate_up, activation, gated=True, deviations=deviations)
    gates, ups = gate_up.chunk(2, dim=-1)
    wide = gates.float()
    count = gates.shape[-1] * shard.size
    mean = shard.all_reduce(wide.sum(-1, keepdim=True)) / count
    squares = shard.all_reduce((wide - mean).square_().sum(-1, keepdim=True))
    cutoff = mean + (squares / count).sqrt_() * deviations
    cut = (wide - cutoff).relu_().to(gates.dtype)
    return ACTIVATIONS[activation](cut).mul_(ups)


def gate(x: Tensor, by: Tensor, activation: str) -> Tensor:
    """x * activation(by) of [T, heads, n] each, ``activation`` being ``silu`` or ``sigmoid``.

    ``by`` may be [T, heads, 1], one number per head.
    """
    if recurrence.usable(x, by):
        layer = recurrence.GateLayer(activation, per_group=by.shape[2] == 1)
        return recurrence.gate(layer, x, by)
    function = torch.sigmoid if activation == "sigmoid" else F.silu
    if by.shape[2] > 1:
        return x * function(by)
    # In float64, since a CPU rounds a few numbers' sigmoids otherwise than many's.
    return x * function(by.double()).to(x.dtype)


def norm_heads_(heads: Tensor, weight: Tensor, eps: float) -> None:
    """:func:`rms_norm` of heads [T, heads, head_dim] in place; ``weight`` [heads, head_dim]."""
    if elementwise.usable(heads, weight):
        elementwise.rotate_(heads, None, None, weight, eps)
        return
    heads.copy_(rms_norm(heads, weight, eps))


def tanh(x: Tensor) -> Tensor:
    """tanh of [T, n] where n is small: a row's does not depend on the rows beside it."""
    if elementwise.usable(x):
        return elementwise.activate(x, "tanh")
    # In float64, since a CPU rounds a few numbers' tangents otherwise than many's.
    return torch.tanh(x.double()).to(x.dtype)


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate queries and keys [T, heads, head_dim] in place, in pairs half a head apart.

    The first half's sine is negative: (a, b) -> (a cos - b sin, b cos + a sin). Angles
    [T, 1, rotated] may be of fewer dimensions than a head has: the others stay as they are.
    """
    if heads.is_cuda and (kernels := triton_kernels()):
        kernels.rotate_(heads, cosines, sines)
        return
    if elementwise.usable(heads):
        elementwise.rotate_(heads, cosines, sines)
        return
    rotated = cosines.shape[-1]
    if rotated < heads.shape[-1]:
        heads = heads[..., :rotated]
    # Three calls, 9 us for one token of 12 heads of 64; with sliced halves it takes 18.
    swapped = heads.roll(rotated // 2, dims=-1)
    heads.mul_(cosines).addcmul_(swapped, sines)


def norm_rotate_(heads: Tensor, weight: Tensor, eps: float, cosines: Tensor, sines: Tensor) -> None:
    """:func:`rms_norm` of each head, then :func:`rotate_`, both in place.

    ``weight`` [heads, head_dim] has the norm's weight once per head, queries' and keys': both
    are done at once, which on a CPU takes 21 us for a token of 24 heads of 128 where one after
    the other takes 50.
    """
    if heads.is_cuda and (kernels := triton_kernels()):
        kernels.norm_rotate_(heads, weight, eps, cosines, sines)
        return
    if elementwise.usable(heads, weight):
        elementwise.rotate_(heads, cosines, sines, weight, eps)
        return
    norm_heads_(heads, weight, eps)
    rotate_(heads, cosines, sines)
