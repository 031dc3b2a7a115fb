"""Attention over rows of latents, whose first dimensions are values as well, in Triton.

Multi-head latent attention in its absorbed form (https://arxiv.org/abs/2405.04434): all heads share
the rows, so a tile's rows are heads of neighbouring tokens: row r is token r // HEADS, head
r % HEADS. A row's latent is read once for scores and values. The part behind it, the rotated key,
is multiplied apart, as 512 + 64 dimensions would make a block of 1,024. Not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.triton_cache import widened
from tgi_cli.attention.triton_kernels import reduce_kernel
from tgi_cli.attention.triton_tiles import Hardware, Tile, num_splits
from tgi_cli.device.triton_launch import cached_launches

MAX_SPLITS = 16
"""The sum over splits holds as many latents in registers."""
_LOG2E = 1.4426950408889634
_LOG2E_CONSTANT = tl.constexpr(_LOG2E)
_LOWEST = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True)
class LatentRows:
    """One layer's cache, contiguous [blocks, block_size, 1, width], and how it is read.

    The first ``rank`` dimensions of a row are values; ``fp8`` is of
    :func:`~tgi_cli.attention.triton_cache.how_to_read`.
    """

    cache: Tensor
    rank: int
    fp8: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """Neighbours in the batch that share a launch.

    ``most`` is of the tokens that one of them has in the step, ``max_keys`` of its KV length.
    """

    first: int
    count: int
    most: int
    max_keys: int


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["query_start_loc", "kv_lens", "block_table"],
)
def latent_kernel(
    query: tl.tensor,  # [T, HEADS, RANK + ROPE], contiguous
    cache: tl.tensor,  # [slots, RANK + ROPE]
    query_start_loc: tl.tensor,  # [B + 1]
    kv_lens: tl.tensor,  # [B]
    block_table: tl.tensor,
    sinks: tl.tensor,  # [HEADS]
    output: tl.tensor,  # [T, HEADS, RANK], contiguous; without WHOLE not written
    parts: tl.tensor,  # float32 [T, HEADS, splits, RANK]; with WHOLE not written
    part_sums: tl.tensor,  # float32 [T, HEADS, splits], log2 of the sum of weights
    scale: float,
    table_stride: int,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WHOLE: tl.constexpr,  # there is one split
) -> None:
    """Grid: (tiles of the sequence with the most rows, splits, B)."""
    tile, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + sequence)
    query_begin = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - query_begin
    per_split = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), tl.num_programs(1))
    begin = split * per_split * BLOCK_N
    count = query_len * HEADS
    if (tile * BLOCK_M < count) & (WHOLE | (begin < kv_len)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        known = rows < count
        heads = rows % HEADS
        places = kv_len - query_len + rows // HEADS
        last_row = tl.minimum((tile + 1) * BLOCK_M, count) - 1
        limit = tl.maximum(kv_len - query_len + last_row // HEADS + 1, 0)
        end = tl.minimum(begin + per_split * BLOCK_N, limit)
        dims = tl.arange(0, BLOCK_R)
        rope_dims = tl.arange(0, BLOCK_P)
        number = query_begin.to(tl.int64) * HEADS + rows
        query_at = query + number[:, None] * (RANK + ROPE)
        latent_mask = known[:, None] & (dims < RANK)[None, :]
        rope_mask = known[:, None] & (rope_dims < ROPE)[None, :]
        latents = tl.load(query_at + dims[None, :], mask=latent_mask, other=0.0)
        ropes = tl.load(query_at + RANK + rope_dims[None, :], mask=rope_mask, other=0.0)
        attended = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), _LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if WHOLE and HAS_SINKS:
            largest = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32) * _LOG2E_CONSTANT
            total += 1.0
        table = block_table + sequence.to(tl.int64) * table_stride
        columns = tl.arange(0, BLOCK_N)
        for start in range(begin, end, BLOCK_N):
            keys = start + columns
            readable = keys < limit
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=readable, other=0)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            row_at = cache + slots[:, None] * (RANK + ROPE)
            # Masked, what lies there counts as zero: it may be what a broken request left.
            row_mask = readable[:, None] & (dims < RANK)[None, :]
            row = tl.load(row_at + dims[None, :], mask=row_mask, other=0)
            key_mask = readable[:, None] & (rope_dims < ROPE)[None, :]
            key = tl.load(row_at + RANK + rope_dims[None, :], mask=key_mask, other=0)
            row = widened(row, latents.dtype, FP8)
            key = widened(key, latents.dtype, FP8)
            scores = tl.dot(ropes, tl.trans(key), input_precision=PRECISION)
            scores = tl.dot(latents, tl.trans(row), scores, input_precision=PRECISION) * scale
            visible = keys[None, :] <= places[:, None]
            scores = tl.where(visible & readable[None, :], scores, float("-inf"))
            before = largest
            largest = tl.maximum(before, tl.max(scores, 1))
            weights = tl.exp2(scores - largest[:, None])
            kept = tl.exp2(before - largest)
            total = total * kept + tl.sum(weights, 1)
            weights = weights.to(row.dtype)
            attended = tl.dot(weights, row, attended * kept[:, None], input_precision=PRECISION)
        # Nothing was attended to in a row of padding, nor by a query that sees no key of a split.
        attended /= tl.where(total == 0.0, 1.0, total)[:, None]
        if WHOLE:
            to = output + number[:, None] * RANK + dims[None, :]
            tl.store(to, attended.to(output.dtype.element_ty), mask=latent_mask)
        else:
            number = number * tl.num_programs(1) + split
            tl.store(parts + number[:, None] * RANK + dims[None, :], attended, mask=latent_mask)
            tl.store(part_sums + number, largest + tl.log2(total), mask=known)


def attend_latents(
    query: Tensor,
    output: Tensor,
    rows: LatentRows,
    metadata: AttentionMetadata,
    sequences: Sequences,
    scale: float,
    sinks: Tensor | None,
    hardware: Hardware,
) -> None:
    """Attend for the tokens of some sequences: query [T, heads, width] to output [T, heads, rank].

    Both are of the whole batch. ``scale`` is of the scores, ``sinks`` as of
    :class:`~tgi_cli.attention.PagedAttention`.
    """
    heads, width = query.shape[1:]
    block_size = rows.cache.shape[1]
    block_r = max(triton.next_power_of_2(rows.rank), 16)
    block_p = max(triton.next_power_of_2(width - rows.rank), 16)
    most_rows = sequences.most * heads
    tile = latent_tile(hardware, most_rows, block_r + block_p, query.itemsize, rows.cache.itemsize)
    tiles = triton.cdiv(most_rows, tile.rows)
    splits = min(
        num_splits(hardware, tile, sequences.count * tiles, 1, sequences.max_keys), MAX_SPLITS
    )
    parts = part_sums = output
    if splits > 1:
        shape = (len(query), heads, splits)
        parts = query.new_empty((*shape, rows.rank), dtype=torch.float32)
        part_sums = query.new_empty(shape, dtype=torch.float32)
    some = slice(sequences.first, sequences.first + sequences.count)
    starts = metadata.query_start_loc[sequences.first :]
    kv_lens, table = metadata.kv_lens[some], metadata.block_table[some]
    latent_kernel[(tiles, splits, sequences.count)](
        query.contiguous(),
        rows.cache,
        starts,
        kv_lens,
        table,
        query if sinks is None else sinks,
        output,
        parts,
        part_sums,
        scale * _LOG2E,
        table.stride(0),
        HEADS=heads,
        RANK=rows.rank,
        ROPE=width - rows.rank,
        BLOCK_SIZE=block_size,
        HAS_SINKS=sinks is not None,
        FP8=rows.fp8,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_R=block_r,
        BLOCK_P=block_p,
        WHOLE=splits == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits == 1:
        return
    reduce_kernel[(heads, sequences.most, sequences.count)](
        parts,
        part_sums,
        starts,
        kv_lens,
        query if sinks is None else sinks,
        output,
        splits,
        HEADS=heads,
        VALUE_DIM=rows.rank,
        WINDOW=0,
        CHUNKED=False,
        HAS_SINKS=sinks is not None,
        BLOCK_S=MAX_SPLITS,
        BLOCK_N=tile.keys,
        BLOCK_V=block_r,
        SEVERAL=True,
        num_warps=8,
    )


def latent_tile(hardware: Hardware, rows: int, dims: int, itemsize: int, kv_itemsize: int) -> Tile:
    """For ``rows`` rows at most, of ``dims`` dimensions in blocks.

    With 3 stages the block table is one tile ahead of the rows that it names, and these of what is
    computed with.
    """
    most = 64 if itemsize == 2 else 16
    needed = min(max(triton.next_power_of_2(rows), 16), most)
    tile = Tile(needed, 64 if itemsize == 2 else 16, 8 if needed > 16 else 4, 3)
    while True:
        under_way = (tile.stages // 2 + 1) * tile.keys * dims * kv_itemsize
        wide = tile.keys * dims * itemsize if kv_itemsize < itemsize else 0
        if tile.rows * dims * itemsize + under_way + wide <= hardware.shared_memory:
            return tile
        if tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows > 16:
            tile = replace(tile, rows=tile.rows // 2, warps=4 if tile.rows == 32 else tile.warps)
        elif tile.stages > 1:
            tile = replace(tile, stages=1)
        else:
            return tile  # as small as it gets
