"""What the kernels of paged attention share: queries attend to tiles of keys, one after the other.

The names and conventions are those of :mod:`tgi_cli.attention.triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_cli.attention.triton_cache import widened

LOWEST = tl.constexpr(-1.0e30)
"""Where a maximum starts: minus infinity would make a NaN of what a row has not seen yet."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def first_visible(places: tl.tensor, WINDOW: tl.constexpr, CHUNKED: tl.constexpr) -> tl.tensor:
    """The first positions that queries at ``places`` see, with a WINDOW that is not 0."""
    if CHUNKED:
        first = places // WINDOW * WINDOW
    else:
        first = tl.maximum(places - WINDOW + 1, 0)
    return first


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def attend_tiles(
    attended: tl.tensor,  # [BLOCK_M, BLOCK_D], what was attended to so far
    largest: tl.tensor,  # [BLOCK_M], the largest score so far
    total: tl.tensor,  # [BLOCK_M], the sum of weights so far
    queries: tl.tensor,  # [BLOCK_M, BLOCK_D]
    places: tl.tensor,  # [BLOCK_M], the positions of the queries
    biases: tl.tensor,  # [BLOCK_M], where the biases of their heads begin
    begin: tl.tensor,  # keys from here, a multiple of BLOCK_N ...
    end: tl.tensor,  # ... to here
    first: tl.tensor,  # what is before or not before ...
    limit: tl.tensor,  # ... is not read
    table: tl.tensor,  # of the sequence
    key_head: tl.tensor,  # the head's first key and value
    value_head: tl.tensor,
    scale: float,
    cap: float,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    DISTANCES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,  # else all queries see all these keys
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    value_dims = tl.arange(0, BLOCK_V)
    value_inside = value_dims < VALUE_DIM
    for start in range(begin, end, BLOCK_N):
        keys = start + columns
        if MASKED:
            readable = (keys >= first) & (keys < limit)
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=readable, other=0)
            key_mask = inside[:, None] & readable[None, :]
            value_mask = readable[:, None] & value_inside[None, :]
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
            key_mask = inside[:, None]
            value_mask = value_inside[None, :]
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        key_at = slots * (KV_HEADS * HEAD_DIM)
        value_at = slots * (KV_HEADS * VALUE_ROW)
        # What lies there unmasked may be what a broken request left: zeros, not times zero.
        key = tl.load(key_head + key_at[None, :] + dims[:, None], mask=key_mask, other=0)
        values_from = value_head + value_at[:, None] + value_dims[None, :]
        value = tl.load(values_from, mask=value_mask, other=0)
        scores = tl.dot(queries, widened(key, queries.dtype, FP8), input_precision=PRECISION)
        factor = scale
        if HAS_CAP:
            scores = cap * (2.0 * tl.sigmoid(scale * scores) - 1.0)
            factor = 1.0
        if DISTANCES > 0:
            far = tl.maximum(places[:, None] - keys[None, :], 0)
            known = tl.load(biases[:, None] + tl.minimum(far, DISTANCES - 1))
            slope = tl.load(biases + (DISTANCES - 1)) - tl.load(biases + (DISTANCES - 2))
            beyond = tl.maximum(far - (DISTANCES - 1), 0).to(tl.float32)
            scores = scores * factor + (known + beyond * slope[:, None]) * LOG2E
            factor = 1.0
        if MASKED:
            visible = keys[None, :] <= places[:, None]
            if WINDOW > 0:
                visible &= keys[None, :] >= first_visible(places, WINDOW, CHUNKED)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - largest[:, None])
        kept = tl.exp2(before - largest)
        total = total * kept + tl.sum(weights, 1)
        value = widened(value, queries.dtype, FP8)
        weights = weights.to(value.dtype)
        attended = tl.dot(weights, value, attended * kept[:, None], input_precision=PRECISION)
    return attended, largest, total
