"""The small operations of a layer, one torch reference each, and which form a device gets."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside.

    https://arxiv.org/abs/1910.07467. With ``one_plus`` the factor is 1 + weight.
    """
    if one_plus:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
        return normed.mul_(1.0 + weight.float()).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum; ``residual`` is overwritten by it."""
    residual = x if residual is None else residual.add_(x)
    return rms_norm(residual, weight, eps, one_plus), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As :func:`add_rms_norm`."""
    residual = x if residual is None else residual.add_(x)
    return layer_norm(residual, weight, bias, eps), residual


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""By transformers' names."""


def activate(x: Tensor, activation: str) -> Tensor:
    """``activation`` of every element."""
    return ACTIVATIONS[activation](x)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of [T, 2 I], gate first: [T, I] (https://arxiv.org/abs/2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate queries and keys [T, heads, head_dim] in place, in pairs half a head apart.

    The first half's sine is negative: (a, b) -> (a cos - b sin, b cos + a sin). Angles
    [T, 1, rotated] may be of fewer dimensions than a head has: the others stay as they are.
    """
    rotated = cosines.shape[-1]
    if rotated < heads.shape[-1]:
        heads = heads[..., :rotated]
    # Three calls, 9 us for one token of 12 heads of 64; with sliced halves it takes 18.
    swapped = heads.roll(rotated // 2, dims=-1)
    heads.mul_(cosines).addcmul_(swapped, sines)
