"""Random weights, for benchmarks of models whose weights are not at hand."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_STD = 0.02
"""As transformers initializes most of its models."""


def random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """float32 numbers that depend on name and shape alone: shards of a model agree on them.

    Vectors are what leaves activations alone: ones, or zeros for a bias.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0.0, _STD, generator=generator)
