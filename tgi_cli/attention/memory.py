"""Memory of caches."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose values are not read before they are written; on a CPU, zeros."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    # numpy's zeros come from calloc: pages appear when they are first written, and no stale
    # NaN of the heap can hide behind a short sequence. (torch.zeros writes them all at once.)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(buffer).view(dtype).view(shape)
