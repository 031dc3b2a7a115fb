"""Triton kernels of paged attention: prompts in tiles, decodes in splits of their KV, and a sum.

All take the cache as it lies, keys [slots, KV_HEADS, HEAD_DIM] and values [slots, KV_HEADS,
VALUE_ROW], of which the first VALUE_DIM count, and compute in float32 but for the products, whose
factors are rounded to the queries' dtype. Query heads that share a KV head are
rows of one tile: row r is token r // GROUP, head r % GROUP. The softmax is online
(https://arxiv.org/abs/1805.02867) over tiles of keys (FlashAttention-2,
https://arxiv.org/abs/2307.08691), in powers of 2: ``scale`` and ``cap`` have log2(e) in them.

With HAS_CAP a score s is ``cap * tanh(scale * s / 2)``, else ``scale * s``. WINDOW is how many
positions a query sees, its own included, or with CHUNKED the size of the chunks of positions of
which it sees its own; 0: all. DISTANCES is how many columns ``bias`` has, which is as
:class:`~tgi_cli.attention.PagedAttention` has it; 0: there is none. The language:
https://triton-lang.org/main/python-api/triton.language.html
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_cli.attention.triton_attend import LOG2E, LOWEST, attend_tiles, first_visible
from tgi_cli.device.triton_launch import cached_launches


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sequence_of(
    query_start_loc: tl.tensor,
    num_sequences: int,
    tile: tl.tensor,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """The sequence that a tile is of, if each begins at its first token // BLOCK_Q + its number."""
    origin = tl.load(query_start_loc)
    low = tile * 0
    high = low + num_sequences
    while low < high:
        middle = (low + high) // 2
        start = tl.load(query_start_loc + middle) - origin
        if start // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


# Of what differs from step to step the compiler is to know nothing: it would compile anew.
@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["query_start_loc", "kv_lens", "block_table"],
)
def prefill_kernel(
    query: tl.tensor,  # [T, heads, HEAD_DIM]
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    query_start_loc: tl.tensor,  # [num_sequences + 1], of the sequences that are prefilled
    kv_lens: tl.tensor,
    block_table: tl.tensor,
    sinks: tl.tensor,  # [heads]
    bias: tl.tensor,  # [heads, DISTANCES]
    output: tl.tensor,  # [T, heads, VALUE_DIM], contiguous
    num_sequences: int,
    scale: float,
    cap: float,
    query_stride: int,
    query_head_stride: int,
    table_stride: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    DISTANCES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid: (total tokens // (BLOCK_M // GROUP) + num_sequences, KV_HEADS)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # The last tiles of a prompt have the most to do: they begin.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(query_start_loc, num_sequences, tile, BLOCK_Q)
    query_begin = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - query_begin
    tiles_before = (query_begin - tl.load(query_start_loc)) // BLOCK_Q + sequence
    first_token = (tile - tiles_before) * BLOCK_Q
    if first_token < query_len:
        earlier = tl.load(kv_lens + sequence) - query_len
        rows = tl.arange(0, BLOCK_M)
        tokens = first_token + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        dims = tl.arange(0, BLOCK_D)
        known = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
        mask = known[:, None] & (dims < HEAD_DIM)[None, :]
        flat = (query_begin + tokens).to(tl.int64)
        at = flat * query_stride + heads * query_head_stride
        queries = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)
        attended = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32)
            largest = sink * LOG2E
            total += 1.0

        places = earlier + tokens
        last_token = tl.minimum(first_token + BLOCK_Q, query_len) - 1
        first = earlier * 0
        all_from = first  # from here to all_to every query of the tile sees every key
        all_to = (earlier + first_token + 1) // BLOCK_N * BLOCK_N
        limit = earlier + last_token + 1
        table = block_table + sequence.to(tl.int64) * table_stride
        key_head = key_cache + kv_head * HEAD_DIM
        value_head = value_cache + kv_head * VALUE_ROW
        biases = bias + heads * DISTANCES
        if WINDOW > 0:
            first = first_visible(earlier + first_token, WINDOW, CHUNKED)
            seen_by_all = first_visible(earlier + last_token, WINDOW, CHUNKED)
            all_from = tl.minimum(tl.cdiv(seen_by_all, BLOCK_N) * BLOCK_N, limit)
            attended, largest, total = attend_tiles(
                attended, largest, total, queries, places, biases,
                first // BLOCK_N * BLOCK_N, all_from, first, limit,
                table, key_head, value_head, scale, cap,
                KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, WINDOW, CHUNKED, DISTANCES,
                HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, BLOCK_V, True,
            )  # fmt: skip
        attended, largest, total = attend_tiles(
            attended, largest, total, queries, places, biases,
            all_from, all_to, first, limit,
            table, key_head, value_head, scale, cap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, WINDOW, CHUNKED, DISTANCES,
            HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, BLOCK_V, False,
        )  # fmt: skip
        attended, largest, total = attend_tiles(
            attended, largest, total, queries, places, biases,
            tl.maximum(all_from, all_to), limit, first, limit,
            table, key_head, value_head, scale, cap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, WINDOW, CHUNKED, DISTANCES,
            HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, BLOCK_V, True,
        )  # fmt: skip
        attended /= total[:, None]
        to = (flat * (KV_HEADS * GROUP) + heads) * VALUE_DIM
        value_dims = tl.arange(0, BLOCK_V)
        tl.store(
            output + to[:, None] + value_dims[None, :],
            attended.to(output.dtype.element_ty),
            mask=known[:, None] & (value_dims < VALUE_DIM)[None, :],
        )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tiles_of(
    kv_len: tl.tensor,
    query_len: tl.tensor,
    num_splits: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """First key that is seen, number of the tile that it is in, and tiles per split."""
    first = kv_len * 0
    if WINDOW > 0:
        first = first_visible(tl.maximum(kv_len - query_len, 0), WINDOW, CHUNKED)
    first_tile = first // BLOCK_N
    tiles = tl.cdiv(kv_len, BLOCK_N) - first_tile
    return first, first_tile, tl.cdiv(tiles, num_splits)


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["query_start_loc", "kv_lens", "block_table"],
)
def decode_kernel(
    query: tl.tensor,  # [T, heads, HEAD_DIM]
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    query_start_loc: tl.tensor,  # [B + 1]; not read unless SEVERAL
    kv_lens: tl.tensor,  # [B]
    block_table: tl.tensor,
    sinks: tl.tensor,  # [heads]
    bias: tl.tensor,  # [heads, DISTANCES]
    output: tl.tensor,  # [T, heads, VALUE_DIM], contiguous; without WHOLE not written
    parts: tl.tensor,  # float32 [T, heads, splits, VALUE_DIM]; with WHOLE not written
    part_sums: tl.tensor,  # float32 [T, heads, splits], log2 of the sum of weights
    scale: float,
    cap: float,
    query_stride: int,
    query_head_stride: int,
    table_stride: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    DISTANCES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SEVERAL: tl.constexpr,  # sequences have up to BLOCK_M // GROUP tokens, else one
    WHOLE: tl.constexpr,  # there is one split
) -> None:
    """Grid: (KV_HEADS, splits, B). How many of the splits have a part is read from ``kv_lens``.

    The same heads of neighbouring tokens lie apart, all heads of one token together: programs
    that run side by side are those of the heads.
    """
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + sequence)
    query_begin = sequence
    query_len = kv_len * 0 + 1
    if SEVERAL:
        query_begin = tl.load(query_start_loc + sequence)
        query_len = tl.load(query_start_loc + sequence + 1) - query_begin
    first, first_tile, per_split = _tiles_of(
        kv_len, query_len, tl.num_programs(1), WINDOW, CHUNKED, BLOCK_N
    )
    begin = (first_tile + split * per_split) * BLOCK_N
    end = tl.minimum(begin + per_split * BLOCK_N, kv_len)
    if WHOLE or begin < end:
        rows = tl.arange(0, BLOCK_M)
        tokens = rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        dims = tl.arange(0, BLOCK_D)
        known = tokens < query_len
        mask = known[:, None] & (dims < HEAD_DIM)[None, :]
        flat = (query_begin + tokens).to(tl.int64)
        at = flat * query_stride + heads * query_head_stride
        queries = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)
        attended = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if WHOLE and HAS_SINKS:
            sink = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32)
            largest = sink * LOG2E
            total += 1.0
        attended, largest, total = attend_tiles(
            attended, largest, total, queries, kv_len - query_len + tokens,
            bias + heads * DISTANCES, begin, end, first, kv_len,
            block_table + sequence.to(tl.int64) * table_stride,
            key_cache + kv_head * HEAD_DIM, value_cache + kv_head * VALUE_ROW, scale, cap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, WINDOW, CHUNKED, DISTANCES,
            HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, BLOCK_V, True,
        )  # fmt: skip
        # Nothing was attended to in a row of padding, nor by a query that sees no key of a split.
        attended /= tl.where(total == 0.0, 1.0, total)[:, None]
        number = flat * (KV_HEADS * GROUP) + heads
        value_dims = tl.arange(0, BLOCK_V)
        kept = known[:, None] & (value_dims < VALUE_DIM)[None, :]
        if WHOLE:
            to = output + number[:, None] * VALUE_DIM + value_dims[None, :]
            tl.store(to, attended.to(output.dtype.element_ty), mask=kept)
        else:
            number = number * tl.num_programs(1) + split
            tl.store(parts + number[:, None] * VALUE_DIM + value_dims[None, :], attended, mask=kept)
            tl.store(part_sums + number, largest + tl.log2(total), mask=known)


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["query_start_loc", "kv_lens"],
)
def reduce_kernel(
    parts: tl.tensor,  # float32 [T, heads, num_splits, VALUE_DIM]
    part_sums: tl.tensor,  # float32 [T, heads, num_splits]
    query_start_loc: tl.tensor,
    kv_lens: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,  # [T, heads, VALUE_DIM], contiguous
    num_splits: int,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the power of 2 that is not below num_splits, or a greater one
    BLOCK_N: tl.constexpr,  # as the parts were made with
    BLOCK_V: tl.constexpr,
    SEVERAL: tl.constexpr,
) -> None:
    """Grid: (heads, most tokens of a sequence, B). Flash-Decoding's second step,
    https://pytorch.org/blog/flash-decoding/."""
    head, token, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + sequence)
    flat = sequence
    query_len = kv_len * 0 + 1
    if SEVERAL:
        flat = tl.load(query_start_loc + sequence)
        query_len = tl.load(query_start_loc + sequence + 1) - flat
    if token < query_len:
        _, first_tile, per_split = _tiles_of(
            kv_len, query_len, num_splits, WINDOW, CHUNKED, BLOCK_N
        )
        splits = tl.arange(0, BLOCK_S)
        made = (splits < num_splits) & ((first_tile + splits * per_split) * BLOCK_N < kv_len)
        dims = tl.arange(0, BLOCK_V)
        inside = dims < VALUE_DIM
        number = (flat + token).to(tl.int64) * HEADS + head
        sums = tl.load(part_sums + number * num_splits + splits, mask=made, other=float("-inf"))
        largest = tl.maximum(tl.max(sums, 0), LOWEST)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            largest = tl.maximum(largest, sink)
        weights = tl.exp2(sums - largest)
        total = tl.sum(weights, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - largest)
        at = (number * num_splits + splits)[:, None] * VALUE_DIM + dims[None, :]
        part = tl.load(parts + at, mask=made[:, None] & inside[None, :], other=0.0)
        attended = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        to = output + number * VALUE_DIM + dims
        tl.store(to, attended.to(output.dtype.element_ty), mask=inside)
