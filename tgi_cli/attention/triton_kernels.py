"""Triton kernels of paged attention: sequences of few tokens in chunks of keys, and of many tokens.

Both take the lists of :mod:`tgi_cli.attention.triton_work`. What they attend to in the chunks of a
sequence, they leave as parts, which :mod:`tgi_cli.attention.triton_reduce` sums up.

All take the cache as it lies, keys [slots, KV_HEADS, HEAD_DIM] and values [slots, KV_HEADS,
VALUE_ROW], of which the first VALUE_DIM count, and compute in float32 but for the products, whose
factors are rounded to the queries' dtype (with a cache of 8 bits to float16, see
:func:`~tgi_cli.attention.triton_attend.load_queries`). Query heads that share a KV head are
rows of one tile: row r is token r // GROUP, head r % GROUP. The softmax is online
(https://arxiv.org/abs/1805.02867) over tiles of keys (FlashAttention-2,
https://arxiv.org/abs/2307.08691), in powers of 2: ``scale`` and ``cap`` have log2(e) in them.

With HAS_CAP a score s is ``cap * tanh(scale * s / 2)``, else ``scale * s``. WINDOW is how many
positions a query sees, its own included, or with CHUNKED the size of the chunks of positions of
which it sees its own; 0: all. SEEN is the same, but where WINDOW is 0 because some queries see all
of a span: then rows have their windows by masks alone. SPANS is how queries see bidirectional spans
(:data:`~tgi_cli.kernels.program_parts.SPAN_CODES`); 0 also where a step has none. DISTANCES is how
many columns ``bias`` has, which is as :class:`~tgi_cli.attention.PagedAttention` has it; 0: there
is none. The constants from FEW_TOKENS to ALIGNMENT are those of
:class:`~tgi_cli.attention.triton_work.Rule`. The language:
https://triton-lang.org/main/python-api/triton.language.html
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_cli.attention.triton_attend import (
    LOG2E,
    LOWEST,
    attend_tiles,
    first_visible,
    load_queries,
)
from tgi_cli.attention.triton_work import lengths_of, partition
from tgi_cli.device.triton_launch import cached_launches


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store_rows(
    to: tl.tensor,  # [BLOCK_M], where rows begin
    rows: tl.tensor,  # [BLOCK_M, BLOCK_V]
    rest: tl.tensor,
    known: tl.tensor,  # [BLOCK_M]
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_V: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_V)
    mask = known[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(to[:, None] + dims[None, :], rows.to(to.dtype.element_ty), mask=mask)
    if REST_V > 0:
        dims = BLOCK_V + tl.arange(0, REST_V)
        mask = known[:, None] & (dims < VALUE_DIM)[None, :]
        tl.store(to[:, None] + dims[None, :], rest.to(to.dtype.element_ty), mask=mask)


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "kv_lens", "block_table", "items", "starts", "parts_at", "counts",
        "visible_until",
    ],
)  # fmt: skip
def decode_kernel(
    query: tl.tensor,  # [T, heads, HEAD_DIM]
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    query_start_loc: tl.tensor,  # [B + 1]
    kv_lens: tl.tensor,  # [B]
    block_table: tl.tensor,
    items: tl.tensor,  # see Work
    starts: tl.tensor,
    parts_at: tl.tensor,
    counts: tl.tensor,
    sinks: tl.tensor,  # [heads]
    bias: tl.tensor,  # [heads, DISTANCES]
    visible_until: tl.tensor,  # int32 [T], as AttentionMetadata has it; read with SPANS alone
    output: tl.tensor,  # [T, heads, VALUE_DIM], contiguous
    parts: tl.tensor,  # float32 [tokens in parts, heads, VALUE_DIM]
    part_sums: tl.tensor,  # float32 [tokens in parts, heads], log2 of the sum of weights
    scale: float,
    cap: float,
    value_scale: float,  # factor of values
    query_stride: int,
    query_head_stride: int,
    table_stride: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SEEN: tl.constexpr,
    SPANS: tl.constexpr,
    DISTANCES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_V: tl.constexpr,
) -> None:
    """Any grid (programs,): they share the list of sequences with few tokens.

    The same heads of neighbouring tokens lie apart, all heads of one token together: programs
    that run side by side are those of the heads.
    """
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP * GROUP
    REST: tl.constexpr = REST_V if REST_V > 0 else 16
    FIRST_DIM: tl.constexpr = BLOCK_D if REST_D > 0 else HEAD_DIM
    rows = tl.arange(0, BLOCK_M)
    work = tl.load(counts) * KV_HEADS
    for number in range(tl.program_id(0), work, tl.num_programs(0)):
        item = number // KV_HEADS
        kv_head = number % KV_HEADS
        sequence = tl.load(items + item)
        query_begin, query_len, kv_len = lengths_of(
            query_start_loc, kv_lens, sequence, sequence >= 0
        )
        _, first, keys_from, size, chunks = partition(
            query_len, kv_len, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
            WINDOW, CHUNKED, ALIGNMENT,
        )  # fmt: skip
        place = item - tl.load(starts + sequence)
        first_token = place // chunks * (BLOCK_M // GROUP)
        tokens = first_token + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        known = (tokens < query_len) & (rows < TILE_ROWS)
        flat = (query_begin + tokens).to(tl.int64)
        at = flat * query_stride + heads * query_head_stride
        queries, queries_rest, scales = load_queries(
            query, at, known, scale, FIRST_DIM, HEAD_DIM, BLOCK_D, REST_D, FP8
        )
        begin = keys_from + place % chunks * size
        places = kv_len - query_len + tokens
        # Keys that no query of the tile sees, as they are of later tokens, are not read.
        last = tl.minimum(first_token + BLOCK_M // GROUP, query_len) - 1
        limit = tl.maximum(kv_len - query_len + last + 1, 0)
        until = places
        if SPANS > 0:
            until = tl.load(visible_until + flat, mask=known, other=-1)
            limit = tl.maximum(limit, tl.max(until, 0) + 1)
        attended = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        attended_rest = tl.zeros((BLOCK_M, REST), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if HAS_SINKS:
            # Of several chunks, the sum over these adds it.
            sink = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32)
            largest = tl.where(chunks == 1, sink * LOG2E, largest)
            total = tl.where(chunks == 1, total + 1.0, total)
        attended, attended_rest, largest, total = attend_tiles(
            attended, attended_rest, largest, total, queries, queries_rest, scales, places,
            until, bias + heads * DISTANCES, begin, tl.minimum(begin + size, limit), first, limit,
            block_table + sequence.to(tl.int64) * table_stride,
            key_cache + kv_head * HEAD_DIM, value_cache + kv_head * VALUE_ROW, cap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, SEEN, CHUNKED, SPANS,
            DISTANCES, HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, REST_D, BLOCK_V, REST_V, True,
        )  # fmt: skip
        # Nothing was attended to in a row of padding, nor by a query that sees no key of a chunk.
        share = value_scale / tl.where(total == 0.0, 1.0, total)
        attended *= share[:, None]
        attended_rest *= share[:, None]
        # Rows are counted anew: kept from before, they would take registers of the loop.
        known = rows < tl.minimum(query_len - first_token, BLOCK_M // GROUP) * GROUP
        at = rows + rows // GROUP * (KV_HEADS * GROUP - GROUP)
        if chunks == 1:
            start = (query_begin + first_token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
            to = output + start * VALUE_DIM + at * VALUE_DIM
            _store_rows(to, attended, attended_rest, known, VALUE_DIM, BLOCK_V, REST_V)
        else:
            start = tl.load(parts_at + sequence) + place % chunks * query_len + first_token
            start = start.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
            part = parts + start * VALUE_DIM + at * VALUE_DIM
            _store_rows(part, attended, attended_rest, known, VALUE_DIM, BLOCK_V, REST_V)
            tl.store(part_sums + start + at, largest + tl.log2(total), mask=known)


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["table_stride", "many_at"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "kv_lens", "block_table", "items", "starts", "parts_at", "counts",
        "visible_until",
    ],
)  # fmt: skip
def prefill_kernel(
    query: tl.tensor,  # [T, heads, HEAD_DIM]
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    query_start_loc: tl.tensor,  # [B + 1]
    kv_lens: tl.tensor,
    block_table: tl.tensor,
    items: tl.tensor,  # see Work
    starts: tl.tensor,
    parts_at: tl.tensor,
    counts: tl.tensor,
    sinks: tl.tensor,  # [heads]
    bias: tl.tensor,  # [heads, DISTANCES]
    visible_until: tl.tensor,  # int32 [T], as AttentionMetadata has it; read with SPANS alone
    output: tl.tensor,  # [T, heads, VALUE_DIM], contiguous
    parts: tl.tensor,  # float32 [tokens in parts, heads, VALUE_DIM]
    part_sums: tl.tensor,  # float32 [tokens in parts, heads], log2 of the sum of weights
    many_at: int,  # where the list begins
    scale: float,
    cap: float,
    value_scale: float,  # factor of values
    query_stride: int,
    query_head_stride: int,
    table_stride: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SEEN: tl.constexpr,
    SPANS: tl.constexpr,
    DISTANCES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_V: tl.constexpr,
) -> None:
    """Grid: (any, KV_HEADS): programs of a head share the list of sequences with many tokens."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    REST: tl.constexpr = REST_V if REST_V > 0 else 16
    FIRST_DIM: tl.constexpr = BLOCK_D if REST_D > 0 else HEAD_DIM
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    for item in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        sequence = tl.load(items + many_at + item)
        query_begin, query_len, kv_len = lengths_of(
            query_start_loc, kv_lens, sequence, sequence >= 0
        )
        _, _, keys_from, size, chunks = partition(
            query_len, kv_len, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
            WINDOW, CHUNKED, ALIGNMENT,
        )  # fmt: skip
        place = item - tl.load(starts + sequence)
        # The last tiles of a prompt have the most to do: they come first.
        first_token = (tl.cdiv(query_len, BLOCK_Q) - 1 - place // chunks) * BLOCK_Q
        tokens = first_token + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        known = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
        flat = (query_begin + tokens).to(tl.int64)
        at = flat * query_stride + heads * query_head_stride
        queries, queries_rest, scales = load_queries(
            query, at, known, scale, FIRST_DIM, HEAD_DIM, BLOCK_D, REST_D, FP8
        )
        attended = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        attended_rest = tl.zeros((BLOCK_M, REST), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32)
            largest = tl.where(chunks == 1, sink * LOG2E, largest)
            total = tl.where(chunks == 1, total + 1.0, total)

        earlier = kv_len - query_len
        places = earlier + tokens
        last_token = tl.minimum(first_token + BLOCK_Q, query_len) - 1
        # Without padding, whose KV length is 0: it sees nothing.
        limit = tl.maximum(earlier + last_token + 1, 0)
        until = places
        if SPANS > 0:
            until = tl.load(visible_until + flat, mask=known, other=-1)
            limit = tl.maximum(limit, tl.max(until, 0) + 1)
        begin = keys_from + place % chunks * size
        end = tl.minimum(begin + size, limit)
        first = earlier * 0
        all_from = begin  # from here to all_to every query of the tile sees every key
        all_to = tl.minimum((earlier + first_token + 1) // BLOCK_N * BLOCK_N, end)
        table = block_table + sequence.to(tl.int64) * table_stride
        key_head = key_cache + kv_head * HEAD_DIM
        value_head = value_cache + kv_head * VALUE_ROW
        biases = bias + heads * DISTANCES
        if SEEN > WINDOW:  # windows by masks alone: there is no tile without
            all_to = begin
        if WINDOW > 0:
            first = first_visible(earlier + first_token, WINDOW, CHUNKED)
            begin = tl.maximum(begin, first // BLOCK_N * BLOCK_N)
            seen_by_all = first_visible(earlier + last_token, WINDOW, CHUNKED)
            all_from = tl.minimum(tl.cdiv(seen_by_all, BLOCK_N) * BLOCK_N, end)
            all_from = tl.maximum(all_from, begin)
            attended, attended_rest, largest, total = attend_tiles(
                attended, attended_rest, largest, total, queries, queries_rest, scales, places,
                until, biases, begin, all_from, first, limit, table, key_head, value_head, cap,
                KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, SEEN, CHUNKED, SPANS,
                DISTANCES, HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, REST_D, BLOCK_V, REST_V, True,
            )  # fmt: skip
        attended, attended_rest, largest, total = attend_tiles(
            attended, attended_rest, largest, total, queries, queries_rest, scales, places,
            until, biases, all_from, all_to, first, limit, table, key_head, value_head, cap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, SEEN, CHUNKED, SPANS,
            DISTANCES, HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, REST_D, BLOCK_V, REST_V, False,
        )  # fmt: skip
        attended, attended_rest, largest, total = attend_tiles(
            attended, attended_rest, largest, total, queries, queries_rest, scales, places,
            until, biases, tl.maximum(all_from, all_to), end, first, limit,
            table, key_head, value_head, cap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_ROW, BLOCK_SIZE, SEEN, CHUNKED, SPANS,
            DISTANCES, HAS_CAP, FP8, PRECISION, BLOCK_N, BLOCK_D, REST_D, BLOCK_V, REST_V, True,
        )  # fmt: skip
        share = value_scale / tl.where(total == 0.0, 1.0, total)
        attended *= share[:, None]
        attended_rest *= share[:, None]
        # Rows are counted anew: kept from before, they would take registers of the loop. What is
        # added is 0, but of this item: else the compiler counts them before the first one, and
        # keeps them.
        stored = tl.arange(0, BLOCK_M) + tl.minimum(sequence, 0)
        known = stored < tl.minimum(query_len - first_token, BLOCK_Q) * GROUP
        at = stored + stored // GROUP * (KV_HEADS * GROUP - GROUP)
        if chunks == 1:
            start = (query_begin + first_token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
            to = output + start * VALUE_DIM + at * VALUE_DIM
            _store_rows(to, attended, attended_rest, known, VALUE_DIM, BLOCK_V, REST_V)
        else:
            start = tl.load(parts_at + sequence) + place % chunks * query_len + first_token
            start = start.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
            part = parts + start * VALUE_DIM + at * VALUE_DIM
            _store_rows(part, attended, attended_rest, known, VALUE_DIM, BLOCK_V, REST_V)
            tl.store(part_sums + start + at, largest + tl.log2(total), mask=known)
