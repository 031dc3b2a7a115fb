"""Normalization layers; each can add its input to a residual before it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tgi_cli.layers import ops, recurrent
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter


class RMSNorm(Loadable):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    https://arxiv.org/abs/1910.07467. With ``one_plus`` the factor is 1 + weight (Gemma), stored as
    that sum in float32: in 16 bits it would lose most of a small weight.
    """

    def __init__(self, build: Build, size: int, eps: float, one_plus: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=torch.float32 if one_plus else build.dtype)
        self.size = size
        self.eps = eps
        self.one_plus = one_plus

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{path}.weight", (self.size,), self._fill)

    def _fill(self, tensor: Tensor) -> None:
        self.weight.copy_(tensor).add_(1.0 if self.one_plus else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; ``residual`` is overwritten by it."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class UnitRMSNorm(RMSNorm):
    """An RMS norm whose weight is one: no checkpoint has it."""

    def slots(self, path: str) -> Iterator[WeightSlot]:
        return iter(())

    def finish(self) -> None:
        self.weight.fill_(1.0)


class LayerNorm(Loadable):
    """(x - mean) / sqrt(variance + eps) * weight + bias (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, build: Build, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=build.dtype)
        self.bias = empty_parameter(size, dtype=build.dtype) if bias else None
        self.size = size
        self.eps = eps

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(f"{path}.weight", "weight", (self.size,))
        if self.bias is not None:
            yield self.slot(f"{path}.bias", "bias", (self.size,))

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :meth:`RMSNorm.add`."""
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class WideRMSNorm(RMSNorm):
    """An RMS norm over a width that is split: x [T, this shard's part] (OLMo 2).

    ``units`` are the heads that stay whole; a head that several shards have counts once.
    """

    def __init__(self, build: Build, size: int, units: int, eps: float) -> None:
        self.own = build.shard.share(size, units)
        super().__init__(build, self.own.stop - self.own.start, eps)
        self.full_size = size
        self.shard = build.shard

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(f"{path}.weight", "weight", (self.full_size,), self.own)

    def forward(self, x: Tensor) -> Tensor:
        if self.shard.size == 1:
            return super().forward(x)
        squares = self.shard.all_reduce(x.float().square().sum(-1, keepdim=True))
        copies = self.shard.size * self.size
        scale = torch.rsqrt(squares / copies + self.eps)
        return (x.float() * scale * self.weight.float()).to(x.dtype)


class GatedRMSNorm(Loadable):
    """The RMS norm of each head times an activation of its gate: x, gate [T, heads, size]."""

    def __init__(self, build: Build, size: int, eps: float, activation: str = "silu") -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=build.dtype)
        self.size = size
        self.eps = eps
        self.activation = activation

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(f"{path}.weight", "weight", (self.size,))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return recurrent.gated_norm(x, gate, self.weight, self.eps, self.activation)


class QKNorm(Loadable):
    """The RMS norms of queries and keys, head by head, with the rotation that follows them.

    Both are done at once: ``weight`` [heads, head_dim] has the norms' weights once per head, the
    queries' first. Weights are those of ``q_norm`` and ``k_norm`` beside it; with ``unit`` they
    are one, and no checkpoint has them. Without KV heads there are queries alone.
    """

    def __init__(
        self,
        build: Build,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        one_plus: bool = False,
        unit: bool = False,
    ) -> None:
        super().__init__()
        dtype = torch.float32 if one_plus else build.dtype
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim, dtype=dtype)
        self.num_heads = num_heads
        self.eps = eps
        self.one_plus = one_plus
        self.unit = unit

    def finish(self) -> None:
        if self.unit:
            self.weight.fill_(1.0)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        if self.unit:
            return
        parent = path.rpartition(".")[0]
        for name, heads in (
            ("q_norm", slice(0, self.num_heads)),
            ("k_norm", slice(self.num_heads, None)),
        ):
            if not len(self.weight[heads]):
                continue
            shape = (self.weight.shape[1],)
            yield WeightSlot(f"{parent}.{name}.weight", shape, partial(self._fill, heads))

    def _fill(self, heads: slice, tensor: Tensor) -> None:
        self.weight[heads].copy_(tensor).add_(1.0 if self.one_plus else 0.0)

    def forward(self, heads: Tensor, rotation: tuple[Tensor, Tensor] | None) -> None:
        """Norm, and rotate, queries and keys [T, heads, head_dim] in place."""
        if rotation is None:
            ops.norm_heads_(heads, self.weight, self.eps)
        else:
            ops.norm_rotate_(heads, self.weight, self.eps, *rotation)
