"""Products whose inputs are split among programs: how many share a tile, and who comes last.

The programs of a tile each write a part of its sums and count themselves in the tile's counter. The
one that finds all others counted adds up the parts, in their order, and resets the counter.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MAX_TILES = 1 << 14
"""Tiles of a product whose inputs are split, at most."""
_MAX_SPLITS = 16
_PROGRAMS = 264
"""Programs that a launch should have: two for each multiprocessor of an H100."""
_MIN_BLOCKS = 4
"""Blocks of inputs of a program at least."""


def num_splits(tiles: int, blocks: int) -> int:
    """Programs that share the inputs of each tile.

    Args:
        tiles: number of tiles of the product.
        blocks: blocks of inputs that a program would have without splits.
    """
    if tiles > MAX_TILES:
        return 1
    return max(1, min(_PROGRAMS // tiles, blocks // _MIN_BLOCKS, _MAX_SPLITS))


def counters(device: torch.device) -> Tensor:
    """int32 [MAX_TILES] of zeros, the same tensor for all products of a device.

    Every launch leaves zeros. Launches of one device run in order, on one stream. The first call
    for a device allocates, and must not be in the capture of a CUDA graph.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _counters(device)


@cache
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
