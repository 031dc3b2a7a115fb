"""A small image encoder, whose features depend on every pixel and every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tgi_cli.models.vision import ImageFeatures, VisionTower
from tgi_cli.models.weight_map import Source

WIDTH = 8


def pixels(seed: int, rows: int) -> dict[str, NDArray[np.float32]]:
    """An image of so many rows."""
    values = np.random.default_rng(seed).standard_normal((rows, WIDTH))
    return {"pixel_values": values.astype(np.float32)}


class Layer(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.passed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passed += 1
        # Rows depend on each other, as by attention.
        return torch.tanh(x @ self.weight + x.mean(0))


class TinyTower(VisionTower):
    """Rows of float32 [WIDTH], with one level of deepstack out of its second layer.

    Attributes:
        failure: raised before the last layer, if set.
        extra: rows that it gives beyond those of the image.
        smallest: rows of its smallest image.
    """

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = nn.ModuleList(Layer(generator) for _ in range(num_layers))
        self.failure: Exception | None = None
        self.extra = 0
        self.smallest = 2
        self.seen: list[dict[str, Tensor]] = []

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def encode(self, tensors: Mapping[str, Tensor], num_rows: int | None) -> ImageFeatures:
        self.seen.append(dict(tensors))
        x = tensors["pixel_values"].float()
        deepstack = x
        for index, block in enumerate(self.blocks):
            self.pauses()
            if index == len(self.blocks) - 1 and self.failure is not None:
                raise self.failure
            x = block(x)
            deepstack = x if index == 1 else deepstack
        return ImageFeatures(torch.cat([x, x[: self.extra]]), (deepstack,))

    def largest(self, max_rows: int) -> dict[str, Any]:
        return pixels(0, max(self.smallest, max_rows))

    def source(self, name: str) -> Source:
        return Source((name,))
