"""Transfers between host and device without waiting: arrays in one copy, and results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16


class Uploader:
    """Host arrays to tensors on one device; see :class:`tgi_cli.sampling.upload.Upload`.

    On a CPU the tensors share the arrays' memory. Elsewhere the arrays are packed into one
    pinned buffer and copied without blocking. The buffer is a temporary: torch's host allocator
    does not reuse its memory before the copy is done, so steps need no barrier between them.

    Args:
        device: where the tensors go.
        packed: whether to pack and copy; for tests, since a CPU does not need it.

    Attributes:
        device: as given.
        packs: whether arrays are packed and copied, or shared.
    """

    def __init__(self, device: torch.device, packed: bool | None = None) -> None:
        self.device = device
        self.packs = device.type != "cpu" if packed is None else packed
        self._pinned = device.type == "cuda"

    def __call__(self, *arrays: NDArray[Any]) -> list[Tensor]:
        if not self.packs:
            return [torch.from_numpy(array) for array in arrays]
        starts = []
        end = 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(end, dtype=torch.uint8, pin_memory=self._pinned)
        host = buffer.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        copy = buffer.to(self.device, non_blocking=True)
        tensors = []
        for start, array in zip(starts, arrays, strict=True):
            tensor = copy[start : start + array.nbytes].view(_DTYPES[array.dtype])
            # Each view takes the host two microseconds.
            tensors.append(tensor if array.ndim == 1 else tensor.view(array.shape))
        return tensors


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def to_host(tensor: Tensor) -> Tensor:
    """Start copying ``tensor`` to the host; the caller waits for an event after this."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
