"""Tile sizes and launch options of the attention kernels: all constants that a GPU wants otherwise.

Chosen by what H100 and H200 have, not by trials at run time: 132 processors, 227 KiB of shared
memory each, tensor cores that take 64 rows per group of four warps. To draw the memory's whole
bandwidth, a processor must have about 30 KiB under way, which a few tiles of 16 KiB do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DECODE_BYTES = 16 * 1024
"""Of the keys, or the values, of a decode's tile."""
DECODE_KEYS = 128
"""At most that many keys, however few bytes they have: scores take registers, too."""
PROGRAMS_PER_PROCESSOR = 4
"""So many programs of a decode at most: two run at once, the others follow those that end early."""
MAX_SPLITS = 64
SHORT_ROWS, LONG_KEYS = 64, 512
"""Sequences whose queries are at most so many rows, over at least so many keys, are split like
decodes where they follow these: drafts to verify, the ends of long prompts."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries, keys, and how a program is run."""

    rows: int
    keys: int
    warps: int
    stages: int


_PREFILL = {
    # From compute capability 9.0 on; their tensor cores read factors from shared memory.
    (True, 2, 64): Tile(128, 64, 8, 3),
    (True, 2, 128): Tile(128, 64, 8, 3),
    (True, 2, 256): Tile(128, 64, 8, 2),
    # Before, factors take registers.
    (False, 2, 64): Tile(128, 64, 8, 3),
    (False, 2, 128): Tile(128, 64, 8, 3),
    (False, 2, 256): Tile(64, 64, 8, 2),
    # float32 is three products of parts (see attend): small tiles, or registers run out.
    (True, 4, 64): Tile(64, 32, 8, 2),
    (True, 4, 128): Tile(16, 32, 4, 2),
    (True, 4, 256): Tile(16, 16, 4, 2),
}
"""By generation, bytes of an element, and a head's dimensions, which are at most that many."""

_DECODE_STAGES = 5
"""The block table is one step ahead of keys and values: with 5, two tiles of these are under way.
For a H100 that makes 64 KiB per program, three of which run at once."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the choice depends on; by default an H100's."""

    processors: int = 132
    shared_memory: int = 227 * 1024
    """Bytes that a program may have."""
    capability: tuple[int, int] = (9, 0)

    @property
    def casts_fp8(self) -> bool:
        """Whether there are instructions for 8-bit floats."""
        return self.capability >= (8, 9)


def prefill_tile(
    hardware: Hardware, dims: int, itemsize: int, kv_itemsize: int, group: int
) -> Tile:
    """For prompts; ``dims`` is a power of 2, ``group`` the query heads of a KV head."""
    late = hardware.capability >= (9, 0) or itemsize == 4
    tile = _PREFILL[late, itemsize, min(max(dims, 64), 256)]
    if kv_itemsize < itemsize and not late:
        tile = replace(tile, rows=64, stages=2)
    if group > tile.rows:
        tile = replace(tile, rows=_next_power_of_2(group))
    return _fitted(hardware, tile, dims, itemsize, kv_itemsize, group)


def decode_tile(hardware: Hardware, dims: int, itemsize: int, kv_itemsize: int, rows: int) -> Tile:
    """For ``rows`` rows: the query heads of a KV head, times the tokens of a sequence."""
    needed = max(_next_power_of_2(rows), 16)  # the fewest that tensor cores take
    keys = min(max(DECODE_BYTES // (dims * kv_itemsize), 16), 32 if itemsize == 4 else DECODE_KEYS)
    tile = Tile(needed, keys, 4 if needed * dims <= 64 * 128 else 8, _DECODE_STAGES)
    return _fitted(hardware, tile, dims, itemsize, kv_itemsize, needed)


def num_splits(hardware: Hardware, tile: Tile, rows: int, kv_heads: int, max_keys: int) -> int:
    """How many programs share the KV of one row, at most; a power of 2."""
    wanted = PROGRAMS_PER_PROCESSOR * hardware.processors // (rows * kv_heads)
    possible = -(-max_keys // tile.keys)
    splits = 1
    while 2 * splits <= min(wanted, possible, MAX_SPLITS):
        splits *= 2
    return splits


def _fitted(
    hardware: Hardware, tile: Tile, dims: int, itemsize: int, kv_itemsize: int, least_rows: int
) -> Tile:
    while True:
        queries = tile.rows * dims * itemsize
        under_way = 2 * (tile.stages // 2 + 1) * tile.keys * dims * kv_itemsize
        widened = 2 * tile.keys * dims * itemsize if kv_itemsize < itemsize else 0
        if queries + under_way + widened <= hardware.shared_memory:
            return tile
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > 32:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows // 2 >= max(least_rows, 16):
            tile = replace(tile, rows=tile.rows // 2, warps=max(tile.warps // 2, 4))
        elif tile.stages > 1:
            tile = replace(tile, stages=1)
        elif tile.keys > 16:
            tile = replace(tile, keys=16)
        else:
            return tile  # as small as it gets


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
