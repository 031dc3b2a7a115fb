"""Attention over rows of latents, whose first dimensions are values as well, in Triton.

Multi-head latent attention in its absorbed form (https://arxiv.org/abs/2405.04434): all heads share
the rows, so a tile's rows are heads of neighbouring tokens: row r is token r // HEADS, head
r % HEADS. A row's latent is read once for scores and values. The part after it, the rotated key,
is multiplied apart, as 512 + 64 dimensions would make a block of 1,024. Not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.triton_attend import load_queries, load_rows
from tgi_cli.attention.triton_cache import widened
from tgi_cli.attention.triton_reduce import Parts, add_up
from tgi_cli.attention.triton_tiles import (
    Hardware,
    Tile,
    next_power_of_2,
    programs_at_once,
)
from tgi_cli.attention.triton_work import (
    Rule,
    Work,
    constants,
    lengths_of,
    partition,
)
from tgi_cli.device.triton_launch import cached_launches

FEW_TOKENS = 4
CHUNK, MAX_CHUNKS = 1024, 16
MANY_CHUNK, SPLIT_TOKENS = 4096, 64
"""A part has all heads' latents, as many numbers as the rows of some hundred tokens."""
MANY_ROWS = 32
"""Of a tile of a sequence with many tokens, at most."""
_WIDE_PART = 64
"""Dimensions of latents in float32 that are multiplied at once. All of a query's, in every warp and
in the parts that make a product of float32, would be more registers than there are."""
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


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["table_stride", "items_at", "list_number"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "kv_lens", "block_table", "items", "starts", "parts_at", "counts"
    ],
)  # fmt: skip
def latent_kernel(
    query: tl.tensor,  # [T, HEADS, RANK + ROPE], contiguous
    cache: tl.tensor,  # [slots, RANK + ROPE]
    query_start_loc: tl.tensor,  # [B + 1]
    kv_lens: tl.tensor,  # [B]
    block_table: tl.tensor,
    items: tl.tensor,  # see Work
    starts: tl.tensor,
    parts_at: tl.tensor,
    counts: tl.tensor,
    sinks: tl.tensor,  # [HEADS]
    output: tl.tensor,  # [T, HEADS, RANK], contiguous
    parts: tl.tensor,  # float32 [tokens in parts, HEADS, RANK]
    part_sums: tl.tensor,  # float32 [tokens in parts, HEADS], log2 of the sum of weights
    items_at: int,  # where the list begins
    list_number: int,  # 0: of sequences with few tokens, 1: with many
    scale: float,
    table_stride: int,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,  # dimensions of latents that are multiplied at once; 0: all of them
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Any grid (programs,): they share a list."""
    WIDTH: tl.constexpr = RANK + ROPE
    own = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_R)
    for item in range(tl.program_id(0), tl.load(counts + list_number), tl.num_programs(0)):
        sequence = tl.load(items + items_at + item)
        query_begin, query_len, kv_len = lengths_of(
            query_start_loc, kv_lens, sequence, sequence >= 0
        )
        _, _, keys_from, size, chunks = partition(
            query_len, kv_len, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
            WINDOW, CHUNKED, ALIGNMENT,
        )  # fmt: skip
        place = item - tl.load(starts + sequence)
        tile = place // chunks
        count = query_len * HEADS
        rows = tile * BLOCK_M + own
        known = rows < count
        heads = rows % HEADS
        places = kv_len - query_len + rows // HEADS
        last_row = tl.minimum((tile + 1) * BLOCK_M, count) - 1
        limit = tl.maximum(kv_len - query_len + last_row // HEADS + 1, 0)
        begin = keys_from + place % chunks * size
        end = tl.minimum(begin + size, limit)
        number = query_begin.to(tl.int64) * HEADS + rows
        latents, ropes, scales = load_queries(
            query, number * WIDTH, known, scale, RANK, WIDTH, BLOCK_R, BLOCK_P, FP8
        )
        attended = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), _LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if HAS_SINKS:
            # Of several chunks, the sum over these adds it.
            sink = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32)
            largest = tl.where(chunks == 1, sink * _LOG2E_CONSTANT, largest)
            total = tl.where(chunks == 1, total + 1.0, total)
        table = block_table + sequence.to(tl.int64) * table_stride
        for start in range(begin, end, BLOCK_N):
            keys = start + columns
            readable = keys < limit
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=readable, other=0)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            row = load_rows(cache + slots * WIDTH, readable, 0, BLOCK_R, RANK, True, False)
            key = load_rows(cache + slots * WIDTH, readable, RANK, BLOCK_P, WIDTH, True, False)
            row = widened(row, latents.dtype, FP8)
            key = widened(key, latents.dtype, FP8)
            scores = tl.dot(ropes, tl.trans(key), input_precision=PRECISION)
            if PART > 0:
                scores = _add_in_parts(
                    scores, query + number * WIDTH, known, cache + slots * WIDTH, readable,
                    RANK, BLOCK_R, PART, FP8, PRECISION,
                )  # fmt: skip
            else:
                scores = tl.dot(latents, tl.trans(row), scores, input_precision=PRECISION)
            scores *= scales[:, None]
            visible = keys[None, :] <= places[:, None]
            scores = tl.where(visible & readable[None, :], scores, float("-inf"))
            before = largest
            largest = tl.maximum(before, tl.max(scores, 1))
            weights = tl.exp2(scores - largest[:, None])
            kept = tl.exp2(before - largest)
            total = total * kept + tl.sum(weights, 1)
            weights = weights.to(row.dtype)
            attended = tl.dot(weights, row, attended * kept[:, None], input_precision=PRECISION)
        # Nothing was attended to in a row of padding, nor by a query that sees no key of a chunk.
        attended /= tl.where(total == 0.0, 1.0, total)[:, None]
        # Rows are counted anew: kept from before, they would take registers of the loop.
        left = own < count - tile * BLOCK_M
        mask = left[:, None] & (dims < RANK)[None, :]
        at = own[:, None] * RANK + dims[None, :]
        if chunks == 1:
            first_row = query_begin.to(tl.int64) * HEADS + tile * BLOCK_M
            tl.store(
                output + first_row * RANK + at, attended.to(output.dtype.element_ty), mask=mask
            )
        else:
            first_row = tl.load(parts_at + sequence) + place % chunks * query_len
            first_row = first_row.to(tl.int64) * HEADS + tile * BLOCK_M
            tl.store(parts + first_row * RANK + at, attended, mask=mask)
            tl.store(part_sums + first_row + own, largest + tl.log2(total), mask=left)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_in_parts(
    scores: tl.tensor,  # [BLOCK_M, BLOCK_N]
    queries: tl.tensor,  # [BLOCK_M], where each begins
    known: tl.tensor,  # [BLOCK_M]
    rows: tl.tensor,  # [BLOCK_N], where each begins
    readable: tl.tensor,  # [BLOCK_N]
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PART: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """``scores`` plus the products of queries and rows in their first RANK dimensions."""
    for first in range(0, BLOCK_R, PART):
        dims = first + tl.arange(0, PART)
        inside = (dims < RANK)[None, :]
        own = tl.load(queries[:, None] + dims[None, :], mask=known[:, None] & inside, other=0.0)
        row = tl.load(rows[:, None] + dims[None, :], mask=readable[:, None] & inside, other=0)
        row = widened(row, own.dtype, FP8)
        scores = tl.dot(own, tl.trans(row), scores, input_precision=PRECISION)
    return scores


def latent_rule(hardware: Hardware, heads: int, cache: LatentRows, dtype: torch.dtype) -> Rule:
    """How sequences become work where ``heads`` heads share the rows of ``cache``."""
    few, many = (_tile(hardware, rows, cache, dtype) for rows in (heads, MANY_ROWS))
    return Rule(
        group=heads,
        few_rows=few.rows,
        many_rows=many.rows,
        few_tokens=FEW_TOKENS,
        chunk=CHUNK,
        max_chunks=MAX_CHUNKS,
        many_chunk=MANY_CHUNK,
        split_tokens=SPLIT_TOKENS,
    )


def attend_latents(
    query: Tensor,
    output: Tensor,
    rows: LatentRows,
    metadata: AttentionMetadata,
    work: Work,
    scale: float,
    sinks: Tensor | None,
    hardware: Hardware,
) -> None:
    """Attend for all tokens of a step: query [T, heads, width] to output [T, heads, rank].

    ``work`` follows :func:`latent_rule`. ``scale`` is of the scores, ``sinks`` as of
    :class:`~tgi_cli.attention.PagedAttention`.
    """
    heads, width = query.shape[1:]
    query = query.contiguous()
    wide = query.dtype == torch.float32
    for many, size in enumerate((work.few, work.many)):
        if not size.items:
            continue
        tile = _tile(hardware, MANY_ROWS if many else heads, rows, query.dtype)
        programs = programs_at_once(hardware, tile, _tile_bytes(tile, rows, query.dtype))
        parts = Parts.empty(size, heads, rows.rank, query.device)
        latent_kernel[(min(size.items, programs),)](
            query,
            rows.cache,
            metadata.query_start_loc,
            metadata.kv_lens,
            metadata.block_table,
            work.items,
            work.starts,
            work.parts_at,
            work.counts,
            query if sinks is None else sinks,
            output,
            parts.numbers,
            parts.sums,
            work.few.items if many else 0,
            many,
            scale * _LOG2E,
            metadata.block_table.stride(0),
            HEADS=heads,
            RANK=rows.rank,
            ROPE=width - rows.rank,
            BLOCK_SIZE=rows.cache.shape[1],
            **constants(work.rule),
            HAS_SINKS=sinks is not None,
            FP8=rows.fp8,
            PRECISION="tf32x3" if wide else "tf32",
            PART=min(_WIDE_PART, _block(rows.rank)) if wide else 0,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_R=_block(rows.rank),
            BLOCK_P=_block(width - rows.rank),
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
        )
        if size.parts:
            add_up(
                parts, work, metadata, output, sinks, 1, hardware, many=bool(many), backwards=False
            )


def latent_tile(hardware: Hardware, rows: int, dims: int, itemsize: int, kv_itemsize: int) -> Tile:
    """For ``rows`` rows at most, of ``dims`` dimensions in blocks.

    With 3 stages the block table is one tile ahead of the rows that it names, and these of what is
    computed with.
    """
    # More rows, or keys that are widened beside them, spill registers.
    most = MANY_ROWS if itemsize == kv_itemsize == 2 else 16
    needed = min(max(next_power_of_2(rows), 16), most)
    tile = Tile(needed, 32 if itemsize == 2 else 16, 8, 3, 255)
    while True:
        if _bytes(tile, dims, itemsize, kv_itemsize) <= hardware.shared_memory:
            return tile
        if tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows > 16:
            tile = replace(tile, rows=tile.rows // 2)
        elif tile.stages > 1:
            tile = replace(tile, stages=1)
        else:
            return tile  # as small as it gets


def _tile(hardware: Hardware, most: int, rows: LatentRows, dtype: torch.dtype) -> Tile:
    """For ``most`` rows at most: the heads of a token, where sequences have few."""
    dims = _block(rows.rank) + _block(rows.cache.shape[-1] - rows.rank)
    return latent_tile(hardware, most, dims, dtype.itemsize, rows.cache.itemsize)


def _tile_bytes(tile: Tile, rows: LatentRows, dtype: torch.dtype) -> int:
    dims = _block(rows.rank) + _block(rows.cache.shape[-1] - rows.rank)
    return _bytes(tile, dims, dtype.itemsize, rows.cache.itemsize)


def _bytes(tile: Tile, dims: int, itemsize: int, kv_itemsize: int) -> int:
    """Shared memory of a program, estimated."""
    under_way = (tile.stages // 2 + 1) * tile.keys * dims * kv_itemsize
    wide = tile.keys * dims * itemsize if kv_itemsize < itemsize else 0
    return tile.rows * dims * itemsize + under_way + wide


def _block(dims: int) -> int:
    return max(next_power_of_2(dims), 16)
