"""Copies of KV blocks in the memory of a GPU's host.

The memory is pinned, so that the device copies it at the full rate of the bus and beside
computation. A block is gathered from all layers into one row, and copied as a whole: a copy for
each layer would cost more to launch than to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from tgi_cli.attention.base import PagedAttention

_STAGING_BYTES = 64 << 20
"""Of the device's memory, for blocks on their way. More of them in one step go in turns."""


class HostCache:
    """Slots for blocks of an allocated cache. No call waits for the device.

    Nor does one take memory of the device, which a step may have left none of: the scheduler
    counts on every copy that it has planned. With a CPU in the device's place, as in tests, copies
    are made at once.

    Args:
        attention: has the cache.
        num_slots: blocks that fit.

    Attributes:
        num_slots: the same.

    Raises:
        ValueError: blocks of this cache are not contiguous.
        RuntimeError: the host has not so much memory, or it cannot be pinned.
    """

    def __init__(self, attention: PagedAttention, num_slots: int) -> None:
        self.num_slots = num_slots
        self._device = attention.device
        if not all(cache.is_contiguous() for cache in attention.stored):
            raise ValueError("blocks of this cache are not contiguous")
        stored = [cache.view(torch.uint8).flatten(1) for cache in attention.stored]
        number = _widest_number(stored)
        self._layers = [cache.view(number) for cache in stored]
        width = sum(layer.shape[1] for layer in self._layers)
        self._slots = torch.empty((num_slots, width), dtype=number)
        self._most = max(1, _STAGING_BYTES // (width * number.itemsize))
        self._staging = torch.empty((self._most, width), dtype=number, device=self._device)
        self._indices = torch.empty(self._most, dtype=torch.int64, device=self._device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            _pin(self._slots)
            self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call, unused-ignore]
                self._device
            )

    def offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, (block, slot) each, in this order.

        What is launched on the current stream later may overwrite the blocks.
        """
        for part in self._parts(pairs):
            blocks = self._ids([block for block, _ in part])
            self._wait_for_copies()
            for layer, staged in self._staged(len(part)):
                torch.index_select(layer, 0, blocks, out=staged)
            with self._copying():
                for row, (_, slot) in zip(self._staging, part, strict=False):
                    self._slots[slot].copy_(row, non_blocking=True)

    def restore(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots to blocks, (slot, block) each; of a block that is there twice, the last."""
        last = {block: slot for slot, block in pairs}
        for part in self._parts([(slot, block) for block, slot in last.items()]):
            blocks = self._ids([block for _, block in part])
            with self._copying():
                for row, (slot, _) in zip(self._staging, part, strict=False):
                    row.copy_(self._slots[slot], non_blocking=True)
            self._wait_for_copies()
            for layer, staged in self._staged(len(part)):
                layer.index_copy_(0, blocks, staged)

    def _parts(self, pairs: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
        return [pairs[start : start + self._most] for start in range(0, len(pairs), self._most)]

    def _staged(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Each layer's cache, and its columns of the first ``count`` staged blocks."""
        found, start = [], 0
        for layer in self._layers:
            end = start + layer.shape[1]
            found.append((layer, self._staging[:count, start:end]))
            start = end
        return found

    def _ids(self, blocks: list[int]) -> Tensor:
        table = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._stream is not None)
        return self._indices[: len(blocks)].copy_(table, non_blocking=True)

    def _copying(self) -> AbstractContextManager[object]:
        """Run copies beside the current stream, after what was launched on it so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _wait_for_copies(self) -> None:
        """What is launched on the current stream from now on waits for the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _widest_number(stored: Sequence[Tensor]) -> torch.dtype:
    """The widest type that the bytes [blocks, width] of all layers can be viewed as.

    torch's kernels gather numbers, whatever their width.
    """
    widths = [part for each in stored for part in (each.shape[1], each.storage_offset())]
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[math.gcd(8, *widths)]


def _pin(memory: Tensor) -> None:
    """Pin a tensor of the CPU for good. torch rounds its own pinned memory to powers of two.

    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister failed with code {code}")
