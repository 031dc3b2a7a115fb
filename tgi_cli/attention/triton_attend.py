"""What the kernels of paged attention share: queries attend to tiles of keys, one after the other.

A head's dimensions are one block or two (:class:`~tgi_cli.attention.triton_tiles.HeadTile`): of
queries and keys BLOCK_D and REST_D, of values BLOCK_V and REST_V. The other names and conventions
are those of :mod:`tgi_cli.attention.triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_cli.attention.triton_cache import widened

LOWEST = tl.constexpr(-1.0e30)
"""Where a maximum starts: minus infinity would make a NaN of what a row has not seen yet."""
LOG2E = tl.constexpr(1.4426950408889634)
_EXPONENT = tl.constexpr(0x7F800000)
_LEAST, _MOST = tl.constexpr(14 << 23), tl.constexpr(254 << 23)
_HEADROOM = tl.constexpr(13 << 23)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def first_visible(places: tl.tensor, WINDOW: tl.constexpr, CHUNKED: tl.constexpr) -> tl.tensor:
    """The first positions that queries at ``places`` see, with a WINDOW that is not 0."""
    if CHUNKED:
        first = places // WINDOW * WINDOW
    else:
        first = tl.maximum(places - WINDOW + 1, 0)
    return first


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load_queries(
    query: tl.tensor,
    at: tl.tensor,  # [BLOCK_M], where each row begins
    known: tl.tensor,  # [BLOCK_M]
    scale: float,
    FIRST_DIM: tl.constexpr,  # dimensions of the first part; the second begins there
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    FP8: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Rows of queries in their parts, and the factor of each row's scores, ``scale`` among others.

    Products with keys of 8 bits are made in float16, which holds these exactly, and which GPUs
    convert them to in pairs; bfloat16 takes twice the instructions. A query of bfloat16 is brought
    into float16's range by a power of 2 of its own, so that none overflows, and what falls below
    the range is less than 2^-27 of the row's largest number.
    """
    queries = load_rows(query + at, known, 0, BLOCK_D, FIRST_DIM, True, False)
    rest = queries
    if REST_D > 0:
        rest = load_rows(query + at, known, FIRST_DIM, REST_D, HEAD_DIM, True, False)
    scales = tl.where(known, scale, 1.0)
    if FP8 > 0 and queries.dtype == tl.bfloat16:
        wide = queries.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)
        wide_rest = wide
        if REST_D > 0:
            wide_rest = rest.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(wide_rest), 1))
        # 2^e as bits: what is not finite stays so, as it does in float16.
        power = largest.to(tl.int32, bitcast=True) & _EXPONENT
        power = tl.minimum(tl.maximum(power, _LEAST), _MOST)
        up = (-(power - _MOST) + _HEADROOM).to(tl.float32, bitcast=True)
        scales *= (power - _HEADROOM).to(tl.float32, bitcast=True)
        queries = (wide * up[:, None]).to(tl.float16)
        rest = (wide_rest * up[:, None]).to(tl.float16)
    return queries, rest, scales


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load_rows(
    places: tl.tensor,  # [rows], where each begins
    readable: tl.tensor,  # [rows]
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,  # else all rows are readable
    TURNED: tl.constexpr,
) -> tl.tensor:
    """Dimensions FIRST to FIRST + BLOCK of rows, [rows, BLOCK] or TURNED; zeros from WIDTH on.

    What is not readable may be what a broken request left: it counts as zeros, not times zero.
    """
    dims = FIRST + tl.arange(0, BLOCK)
    if TURNED:
        at = places[None, :] + dims[:, None]
        inside = (dims < WIDTH)[:, None]
        seen = readable[None, :]
    else:
        at = places[:, None] + dims[None, :]
        inside = (dims < WIDTH)[None, :]
        seen = readable[:, None]
    if MASKED and FIRST + BLOCK > WIDTH:
        rows = tl.load(at, mask=inside & seen, other=0)
    elif MASKED:
        rows = tl.load(at, mask=seen, other=0)
    elif FIRST + BLOCK > WIDTH:
        rows = tl.load(at, mask=inside, other=0)
    else:
        rows = tl.load(at)
    return rows


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def attend_tiles(
    attended: tl.tensor,  # [BLOCK_M, BLOCK_V], what was attended to so far
    attended_rest: tl.tensor,  # [BLOCK_M, REST_V or anything]
    largest: tl.tensor,  # [BLOCK_M], the largest score so far
    total: tl.tensor,  # [BLOCK_M], the sum of weights so far
    queries: tl.tensor,  # [BLOCK_M, BLOCK_D]
    queries_rest: tl.tensor,  # [BLOCK_M, REST_D or anything]
    scales: tl.tensor,  # [BLOCK_M], factors of the rows' scores
    places: tl.tensor,  # [BLOCK_M], the positions of the queries
    until: tl.tensor,  # [BLOCK_M], last positions of their spans, -1 without; read with SPANS alone
    biases: tl.tensor,  # [BLOCK_M], where the biases of their heads begin
    begin: tl.tensor,  # keys from here, a multiple of BLOCK_N ...
    end: tl.tensor,  # ... to here
    first: tl.tensor,  # what is before or not before ...
    limit: tl.tensor,  # ... is not read
    table: tl.tensor,  # of the sequence
    key_head: tl.tensor,  # the head's first key and value
    value_head: tl.tensor,
    cap: float,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPANS: tl.constexpr,
    DISTANCES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_V: tl.constexpr,
    MASKED: tl.constexpr,  # else all queries see all these keys
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    columns = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        keys = start + columns
        readable = (keys >= first) & (keys < limit)
        if MASKED:
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=readable, other=0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        keys_from = key_head + slots * (KV_HEADS * HEAD_DIM)
        values_from = value_head + slots * (KV_HEADS * VALUE_ROW)
        key = load_rows(keys_from, readable, 0, BLOCK_D, HEAD_DIM, MASKED, True)
        value = load_rows(values_from, readable, 0, BLOCK_V, VALUE_DIM, MASKED, False)
        key = widened(key, queries.dtype, FP8)
        scores = tl.dot(queries, key, input_precision=PRECISION)
        if REST_D > 0:
            key_rest = load_rows(keys_from, readable, BLOCK_D, REST_D, HEAD_DIM, MASKED, True)
            key_rest = widened(key_rest, queries.dtype, FP8)
            scores = tl.dot(queries_rest, key_rest, scores, input_precision=PRECISION)
        factors = scales[:, None]
        if HAS_CAP:
            scores = cap * (2.0 * tl.sigmoid(factors * scores) - 1.0)
        if DISTANCES > 0:
            far = tl.maximum(places[:, None] - keys[None, :], 0)
            known = tl.load(biases[:, None] + tl.minimum(far, DISTANCES - 1))
            slope = tl.load(biases + (DISTANCES - 1)) - tl.load(biases + (DISTANCES - 2))
            beyond = tl.maximum(far - (DISTANCES - 1), 0).to(tl.float32)
            if not HAS_CAP:
                scores *= factors
            scores += (known + beyond * slope[:, None]) * LOG2E
        if MASKED:
            last = places
            if SPANS > 0:
                last = tl.maximum(places, until)
            visible = keys[None, :] <= last[:, None]
            if WINDOW > 0:
                since = first_visible(places, WINDOW, CHUNKED)
                if SPANS == 2:
                    since = tl.where(until >= 0, 0, since)
                visible &= keys[None, :] >= since[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        before = largest
        if HAS_CAP or DISTANCES > 0:
            largest = tl.maximum(before, tl.max(scores, 1))
            weights = tl.exp2(scores - largest[:, None])
        else:
            # One product and sum per score: the factor is applied to what the maximum is taken of.
            largest = tl.maximum(before, tl.max(scores, 1) * scales)
            weights = tl.exp2(scores * factors - largest[:, None])
        kept = tl.exp2(before - largest)
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(queries.dtype)
        value = widened(value, queries.dtype, FP8)
        attended = tl.dot(weights, value, attended * kept[:, None], input_precision=PRECISION)
        if REST_V > 0:
            value_rest = load_rows(values_from, readable, BLOCK_V, REST_V, VALUE_DIM, MASKED, False)
            value_rest = widened(value_rest, queries.dtype, FP8)
            attended_rest = tl.dot(
                weights, value_rest, attended_rest * kept[:, None], input_precision=PRECISION
            )
    return attended, attended_rest, largest, total
