"""Normalization layers; each can take in the residual that is to be added before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tgi_cli.layers import ops
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter


class RMSNorm(Loadable):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    https://arxiv.org/abs/1910.07467. With ``one_plus`` the factor is 1 + weight (Gemma).
    """

    def __init__(self, build: Build, size: int, eps: float, one_plus: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=build.dtype)
        self.size = size
        self.eps = eps
        self.one_plus = one_plus

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{path}.weight", (self.size,), lambda tensor: self.weight.copy_(tensor))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.one_plus)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; ``residual`` is overwritten by it."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.one_plus)


class LayerNorm(Loadable):
    """(x - mean) / sqrt(variance + eps) * weight + bias (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, build: Build, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=build.dtype)
        self.bias = empty_parameter(size, dtype=build.dtype) if bias else None
        self.size = size
        self.eps = eps

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{path}.weight", (self.size,), lambda tensor: self.weight.copy_(tensor))
        if self.bias is not None:
            yield WeightSlot(f"{path}.bias", (self.size,), self._fill_bias)

    def _fill_bias(self, tensor: Tensor) -> None:
        assert self.bias is not None
        self.bias.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :meth:`RMSNorm.add`."""
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class WideRMSNorm(RMSNorm):
    """An RMS norm over a width that is shared out: x [T, this shard's part] (OLMo 2).

    ``units`` are the heads that stay whole; a head that several shards have counts once.
    """

    def __init__(self, build: Build, size: int, units: int, eps: float) -> None:
        self.own = build.shard.share(size, units)
        super().__init__(build, self.own.stop - self.own.start, eps)
        self.full_size = size
        self.shard = build.shard

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(
            f"{path}.weight",
            (self.full_size,),
            lambda tensor: self.weight.copy_(tensor[self.own]),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.shard.size == 1:
            return super().forward(x)
        squares = self.shard.all_reduce(x.float().square().sum(-1, keepdim=True))
        copies = self.shard.size * self.size
        scale = torch.rsqrt(squares / copies + self.eps)
        return (x.float() * scale * self.weight.float()).to(x.dtype)
