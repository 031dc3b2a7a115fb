"""Tile sizes and launch options of the attention kernels: all constants that a GPU wants otherwise.

Chosen by what H100 and H200 have, not by trials at run time: 132 processors, 227 KiB of shared
memory each, tensor cores that take 64 rows per group of four warps. To draw the memory's whole
bandwidth, a processor must have about 30 KiB under way, which a few tiles of 8 KiB do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KEY_ALIGNMENT = 64
"""Tiles of keys begin at a multiple of their size, which divides this; chunks of a sequence begin
at a multiple of this."""
PROGRAMS_PER_PROCESSOR = 4
"""Limit of the decodes' programs that a processor runs at once."""
REGISTERS_PER_PROCESSOR = 65536


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries, keys, and how a program is run."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """Limit of a thread's registers. Default: what a GPU has, 255."""


_PREFILL = {
    # From compute capability 9.0 on; their tensor cores read factors from shared memory.
    (True, 2, 64): Tile(128, 64, 8, 3),
    (True, 2, 128): Tile(128, 64, 8, 3),
    (True, 2, 192): Tile(128, 64, 8, 2),
    (True, 2, 256): Tile(64, 32, 8, 2),
    # Before, factors take registers.
    (False, 2, 64): Tile(128, 64, 8, 3),
    (False, 2, 128): Tile(128, 64, 8, 3),
    (False, 2, 192): Tile(64, 64, 8, 2),
    (False, 2, 256): Tile(64, 64, 8, 2),
    # float32 is three products of parts (see attend): small tiles, or registers run out.
    (True, 4, 64): Tile(64, 32, 8, 2),
    (True, 4, 128): Tile(16, 32, 4, 2),
    (True, 4, 192): Tile(16, 16, 4, 2),
    (True, 4, 256): Tile(16, 16, 4, 2),
}
"""By generation, bytes of an element, and a head's dimensions, which are at most that many."""

_DECODE_KEYS = ((64, 64), (256, 32))
"""Keys of a decode's tile, by dimensions up to which there are as many; else 16. Twice as many take
1.6 times the registers: fewer programs run at once, and less is read while others begin or end."""

_DECODE_REGISTERS = ((128, 128), (192, 168))
"""A thread's for 16 rows of 16 bits, by dimensions: a GPU then runs four programs at once, or
three, instead of the number that the compiler's choice allows. Heads in two parts, keys that are
widened, biases, and masks other than windows take more than four programs may have."""

_DECODE_STAGES = 5
"""The block table is one step ahead of keys and values: with 5, two tiles of these are under way.
For an H100 that makes 32 KiB per program, four of which run at once."""


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


@dataclass(frozen=True, slots=True)
class HeadTile:
    """A head's dimensions in a tile, whose sizes are powers of 2: one part, or two.

    80 dimensions are 64 and 16, 96 are 64 and 32, 192 are 128 and 64: what is read and multiplied
    is not padded to the next power of 2.
    """

    block: int
    rest: int
    """Size of the second part, at least 16 (the least that tensor cores take); 0: there is none."""

    @property
    def dims(self) -> int:
        return self.block + self.rest

    @classmethod
    def of(cls, dims: int) -> HeadTile:
        """For keys or values of ``dims`` dimensions."""
        whole = max(next_power_of_2(dims), 16)
        block = whole // 2
        rest = max(next_power_of_2(dims - block), 16)
        return cls(block, rest) if block >= 16 and block + rest < whole else cls(whole, 0)


def prefill_tile(
    hardware: Hardware,
    dims: int,
    itemsize: int,
    kv_itemsize: int,
    group: int,
    chunked: bool = False,
) -> Tile:
    """For prompts.

    Args:
        hardware: the device.
        dims: of a :class:`HeadTile`.
        itemsize, kv_itemsize: bytes of a number of queries, and of keys.
        group: query heads of a KV head.
        chunked: whether queries see their own chunk of positions.
    """
    late = hardware.capability >= (9, 0) or itemsize == 4
    tile = _PREFILL[late, itemsize, next((n for n in (64, 128, 192) if dims <= n), 256)]
    # More keys spill registers: where chunks are masked, of heads of 64 and 32 dimensions, and,
    # before compute capability 9.0, where rows are divided by a group that is no power of 2.
    if late:
        hard = chunked or dims == 96 or hardware.capability >= (10, 0)
    else:
        hard = chunked or group != next_power_of_2(group) or (kv_itemsize < itemsize and dims > 192)
    if itemsize == 2 and dims > 64 and hard:
        stages = 2 if chunked and hardware.capability >= (10, 0) else tile.stages
        tile = replace(tile, keys=32, stages=stages)
    if late and kv_itemsize < itemsize == 2 and dims > 192:
        tile = replace(tile, rows=32, warps=4)  # as do more rows, beside keys that are widened
    if kv_itemsize < itemsize and not late:
        tile = replace(tile, rows=64, stages=2)
    if group > tile.rows:
        tile = replace(tile, rows=next_power_of_2(group))
    return _fitted(hardware, tile, dims, itemsize, kv_itemsize, group)


def decode_tile(
    hardware: Hardware,
    dims: int,
    itemsize: int,
    kv_itemsize: int,
    group: int,
    plain: bool = True,
) -> Tile:
    """For sequences of few tokens: a tile has the ``group`` heads of one token, or of several.

    ``plain``: scores are masked by windows at most, and nothing is added to them.
    """
    needed = max(next_power_of_2(group), 16)  # the fewest that tensor cores take
    keys = _by_dimensions(_DECODE_KEYS, dims) or 16
    registers = None
    if itemsize == 4:  # in three parts, see _PREFILL
        keys = min(keys, 32 if dims <= 128 else 16)
    elif needed == 16:
        whole = dims == next_power_of_2(dims)
        least = 0 if plain and whole and kv_itemsize == itemsize else 129
        registers = _by_dimensions(_DECODE_REGISTERS, max(dims, least))
        if dims == 80:  # 64 and 16 take 170
            registers = None
    warps = 4 if needed * dims <= 64 * 128 else 8
    tile = Tile(needed, keys, warps, _DECODE_STAGES, registers)
    return _fitted(hardware, tile, dims, itemsize, kv_itemsize, needed)


def _by_dimensions(table: tuple[tuple[int, int], ...], dims: int) -> int | None:
    return next((number for most, number in table if dims <= most), None)


def programs_at_once(hardware: Hardware, tile: Tile, shared_bytes: int) -> int:
    """How many programs of decodes the device runs at once, without one that waits for another."""
    fits = min(hardware.shared_memory // (shared_bytes + 1024), PROGRAMS_PER_PROCESSOR)
    registers = (tile.registers or 256) * 32 * tile.warps
    return hardware.processors * max(1, min(fits, REGISTERS_PER_PROCESSOR // registers))


def tile_bytes(tile: Tile, dims: int, itemsize: int, kv_itemsize: int) -> int:
    """Shared memory of a program, estimated: queries, tiles under way, and widened ones."""
    queries = tile.rows * dims * itemsize
    under_way = 2 * (tile.stages // 2 + 1) * tile.keys * dims * kv_itemsize
    widened = 2 * tile.keys * dims * itemsize if kv_itemsize < itemsize else 0
    return queries + under_way + widened


def _fitted(
    hardware: Hardware, tile: Tile, dims: int, itemsize: int, kv_itemsize: int, least_rows: int
) -> Tile:
    while True:
        if tile_bytes(tile, dims, itemsize, kv_itemsize) <= hardware.shared_memory:
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


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below ``number``, which is positive."""
    return 1 << (number - 1).bit_length()
