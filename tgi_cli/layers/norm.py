"""Root mean square layer normalization (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn.functional import rms_norm

from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter


class RMSNorm(Loadable):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=build.dtype)
        self.size = size
        self.eps = eps

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{path}.weight", (self.size,), lambda tensor: self.weight.copy_(tensor))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; ``residual`` is overwritten by it."""
        residual = x if residual is None else residual.add_(x)
        return rms_norm(residual, (self.size,), self.weight, self.eps), residual
