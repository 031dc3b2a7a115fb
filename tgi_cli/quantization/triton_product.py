"""Products with quantized weights in one Triton kernel: of 16-bit activations, or e4m3 with e4m3.

For any number of rows, on tensor cores: a tile of codes becomes numbers of the activations' dtype
in registers, exactly, is multiplied with a tile of activations, and the scale of a group is applied
to the group's sums, in float32. So a weight is never rounded, and a row's result is the same up to
the order of sums however many rows there are.

The product is computed transposed, [outputs, rows], so that on Hopper the decoded weight is the
operand that may stay in registers, and few rows fill a narrow tile. With few rows the inputs are
split among programs; the last one of a tile to finish adds up the parts, in their order.

The same kernel multiplies the rows of a mixture's experts, sorted by expert: a program finds its
expert and rows in the ends of the groups, so that a launch depends on the number of rows alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches
from tgi_cli.quantization import split_inputs
from tgi_cli.quantization.tiled_weight import (
    E2M1,
    E4M3,
    INTEGER,
    TABLE,
    ExpertRows,
    TiledWeight,
)
from tgi_cli.quantization.triton_quantize import quantize_rows

MAX_SPLIT_ROWS = 64
"""Rows up to which inputs are split: more of them make enough programs."""

_INTEGER = tl.constexpr(INTEGER)
_E2M1 = tl.constexpr(E2M1)
_E4M3 = tl.constexpr(E4M3)
_TABLE = tl.constexpr(TABLE)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decoded(
    codes: tl.tensor,
    zero: tl.tensor,
    table: tl.tensor,
    FORM: tl.constexpr,
    FRACTIONS: tl.constexpr,
) -> tl.tensor:
    """What uint8 codes stand for in float32: exactly, unless zeros are fractions."""
    bits = codes.to(tl.uint32)
    if FORM == _E2M1:
        # The exponent's two bits and the mantissa's one where a float32 has them; 2^126 makes up
        # for the bias, also of the subnormal.
        bits = ((bits & 8) << 28) | ((bits & 7) << 22)
        values = bits.to(tl.float32, bitcast=True) * (2.0**126)
    elif FORM == _E4M3:
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        values = bits.to(tl.float32, bitcast=True) * (2.0**120)
    elif FORM == _TABLE:
        values = tl.load(table + bits.to(tl.int32))
    else:
        # The last bits of 2^23: cheaper than a conversion.
        values = (bits | 0x4B000000).to(tl.float32, bitcast=True)
        if FRACTIONS:  # which would be lost in the sum of 2^23 and a zero
            values = (values - 8388608.0) - zero
        else:
            values = values - (zero + 8388608.0)
    return values


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale_of(stored: tl.tensor) -> tl.tensor:
    if stored.dtype == tl.uint8:
        # The exponent of a float32; 2^-127 is a subnormal one.
        bits = tl.maximum(stored.to(tl.int32) << 23, 0x00400000)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def place(
    tile: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert of a tile of rows, its first row, and the end of the expert's rows.

    A tile beyond the last has no rows.
    """
    expert = tile * 0
    start = tile * BLOCK_M
    end = rows
    if EXPERTS > 0:
        every = tl.arange(0, PADDED_EXPERTS)
        last = tl.load(ends + every, mask=every < EXPERTS, other=0)
        first = tl.load(ends + every - 1, mask=(every > 0) & (every < EXPERTS), other=0)
        tiles = (tl.maximum(last - first, 0) + BLOCK_M - 1) // BLOCK_M
        tile_ends = tl.cumsum(tiles, 0)
        expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
        own = every == expert
        start = tl.sum(tl.where(own, first + (tile - tile_ends + tiles) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(own, last, 0), 0)
    return expert, start, end


@cached_launches
@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator, unused-ignore]
def _product_kernel(
    x: tl.tensor,  # [.., K]
    x_scales: tl.tensor,  # float32 [.., groups], with FP8_INPUTS
    data: tl.tensor,  # uint8 [E, blocks, N, DEPTH]
    scales: tl.tensor,  # [E, groups, N]
    zeros: tl.tensor,  # uint8 or float32 [E, groups, N]
    table: tl.tensor,  # float32 [16]
    bias: tl.tensor,  # [E, N]
    ends: tl.tensor,  # int32 [E]
    pairs: tl.tensor,  # int32 [P], of the rows' order: see triton_product
    product: tl.tensor,  # [P, N]
    parts: tl.tensor,  # float32 [tiles, splits, BLOCK_N, BLOCK_M]
    arrived: tl.tensor,  # int32 [tiles], zeros
    rows: int,
    N: int,
    blocks: int,
    groups: int,
    x_stride: int,
    splits: int,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8_INPUTS: tl.constexpr,  # x is e4m3, as uint8, as is the weight
    EXPERTS: tl.constexpr,  # 0: one weight, no groups of rows
    PADDED_EXPERTS: tl.constexpr,
    SHARED_BY: tl.constexpr,  # pairs that read the same row of x; 0: row i of x is of row i
    SCATTERED: tl.constexpr,  # row i of the product goes to its pair
    MAY_SPLIT: tl.constexpr,  # whether it depends on the launch: see MAX_SPLIT_ROWS
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid: (tiles of rows, tiles of outputs, splits)."""
    tile, column, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, start, end = place(tile, ends, rows, EXPERTS, PADDED_EXPERTS, BLOCK_M)
    if start < end:
        HALVES: tl.constexpr = 8 // BITS
        DTYPE: tl.constexpr = x.dtype.element_ty
        FRACTIONS: tl.constexpr = HAS_ZEROS and zeros.dtype.element_ty == tl.float32
        rows_of_tile = start + tl.arange(0, BLOCK_M)
        in_rows = rows_of_tile < end
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        in_width = columns < N
        inner = tl.arange(0, DEPTH)
        sources = rows_of_tile
        if SHARED_BY > 0:
            sources = tl.load(pairs + rows_of_tile, mask=in_rows, other=0) // SHARED_BY
        first = split * blocks // splits
        last = (split + 1) * blocks // splits
        sources = sources.to(tl.int64)
        x_at = x + sources[None, :] * x_stride + inner[:, None]
        data_at = data + (expert.to(tl.int64) * blocks * N + columns[:, None]) * DEPTH
        data_at += first.to(tl.int64) * N * DEPTH + inner[None, :]
        of_expert = expert.to(tl.int64) * groups * N
        scales += of_expert
        zeros += of_expert
        sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        zero = 0.0
        if FORM == _INTEGER:
            zero = 8.0 if BITS == 4 else 128.0
            if HAS_ZEROS and STEPS == 0:
                stored = tl.load(zeros + columns, mask=in_width, other=0)
                zero = stored.to(tl.float32)[:, None]
        for block in range(first, last):
            codes = tl.load(data_at, mask=in_width[:, None], other=0)
            data_at += N * DEPTH
            offset = zero
            part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for half in tl.static_range(HALVES):
                step = block * HALVES + half
                # A group begins: steps of one byte share it, or each has its own.
                if STEPS > 0 and (half == 0 or STEPS % HALVES > 0):
                    group_at = columns + step // STEPS * N
                    scale = _scale_of(tl.load(scales + group_at, mask=in_width, other=0))
                    factor = scale[:, None]
                    if FP8_INPUTS:
                        own_at = x_scales + sources * groups + step // STEPS
                        factor *= tl.load(own_at, mask=in_rows, other=0.0)[None, :]
                    if HAS_ZEROS:
                        stored = tl.load(zeros + group_at, mask=in_width, other=0)
                        offset = stored.to(tl.float32)[:, None]
                number = codes
                if BITS == 4:
                    number = (codes >> 4) if half == 1 else (codes & 15)
                a = tl.load(x_at + step * DEPTH, mask=in_rows[None, :], other=0)
                if FP8_INPUTS:
                    weight = number.to(tl.float8e4nv, bitcast=True)
                    a = a.to(tl.float8e4nv, bitcast=True)
                else:
                    weight = _decoded(number, offset, table, FORM, FRACTIONS).to(DTYPE)
                if STEPS == 0:
                    sums = tl.dot(weight, a, sums, input_precision=PRECISION)
                else:
                    part = tl.dot(weight, a, part, input_precision=PRECISION)
                    if half == HALVES - 1 or STEPS % HALVES > 0:
                        sums += part * factor
                        part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        done = True
        if MAY_SPLIT:
            at = tile * tl.num_programs(1) + column
            numbers = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            of_tile = parts + at.to(tl.int64) * splits * (BLOCK_N * BLOCK_M) + numbers
            done = splits == 1
            if splits > 1:
                tl.store(of_tile + split * (BLOCK_N * BLOCK_M), sums)
                tl.debug_barrier()  # all of it, before this program counts as done
                done = tl.atomic_add(arrived + at, 1, sem="acq_rel") == splits - 1
        if done:
            if MAY_SPLIT:  # noqa: SIM102 (this one is the compiler's, the next one the GPU's)
                if splits > 1:
                    tl.store(arrived + at, 0)  # as the next launch expects it
                    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                    for other in range(0, splits):
                        # Not from the first-level cache: other multiprocessors wrote it.
                        sums += tl.load(of_tile + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            # Rows are counted anew: kept from before, they would take registers of the loop.
            own_rows = tl.arange(0, BLOCK_M)
            left = own_rows < end - start
            if STEPS == 0:
                whole = tl.load(scales + columns, mask=in_width, other=0)
                sums *= _scale_of(whole)[:, None]
                if FP8_INPUTS:
                    own = tl.load(x_scales + sources, mask=in_rows, other=0.0)
                    sums *= own[None, :]
            if HAS_BIAS:
                # So are columns. The compiler does not know that 0 is added, or it would not.
                own_columns = columns + tl.minimum(last, 0)
                added = tl.load(bias + expert * N + own_columns, mask=own_columns < N, other=0.0)
                sums += added.to(tl.float32)[:, None]
            if SCATTERED:
                targets = tl.load(pairs + start + own_rows, mask=left, other=0).to(tl.int64)
            else:
                product += start.to(tl.int64) * N
                targets = own_rows.to(tl.int64)
            tl.store(
                product + targets[None, :] * N + columns[:, None],
                sums.to(product.dtype.element_ty),
                mask=in_width[:, None] & left[None, :],
            )


def triton_product(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, experts: ExpertRows | None = None
) -> Tensor:
    """x [T, K] times the weight, plus ``bias`` [E, N]: [T, N], or [P, N] for rows of experts.

    Args:
        x: bfloat16 or float16 (or float32, for tests), contiguous in its last dimension.
        weight: on the same device, of one expert without ``experts``.
        bias: contiguous.
        experts: which rows are multiplied with which expert's weight. Default: all with the one.
    """
    rows = len(x) if experts is None else len(experts.pairs)
    product = x.new_empty(rows, weight.outputs)
    if not rows:
        return product
    x_scales = x
    if weight.fp8_inputs:
        x, x_scales = quantize_rows(x, weight.scales.shape[1])
        x = x.view(torch.uint8)
    num_experts = 0 if experts is None else len(experts.ends)
    block_m, block_n, options = tile_of(rows / max(1, num_experts), weight)
    tiles = triton.cdiv(rows, block_m)
    if num_experts:  # each may leave one tile unfilled
        tiles = min(rows, rows // block_m + num_experts)
    columns = triton.cdiv(weight.outputs, block_n)
    blocks = weight.data.shape[1]
    splits = 1 if rows > MAX_SPLIT_ROWS else split_inputs.num_splits(tiles * columns, blocks)
    arrived = split_inputs.counters(x.device)
    parts = arrived.view(torch.float32)  # not written, but of the dtype that is compiled for
    if splits > 1:
        parts = torch.empty(
            tiles * columns * splits * block_m * block_n, dtype=torch.float32, device=x.device
        )
    _product_kernel[(tiles, columns, splits)](
        x,
        x_scales,
        weight.data,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.table is None else weight.table,
        x if bias is None else bias,
        x if experts is None else experts.ends,
        x if experts is None else experts.pairs,
        product,
        parts,
        arrived,
        rows,
        weight.outputs,
        blocks,
        weight.scales.shape[1],
        x.stride(0),
        splits,
        BITS=weight.bits,
        FORM=weight.form,
        DEPTH=weight.depth,
        STEPS=weight.steps,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        FP8_INPUTS=weight.fp8_inputs,
        EXPERTS=num_experts,
        PADDED_EXPERTS=triton.next_power_of_2(max(1, num_experts)),
        SHARED_BY=0 if experts is None else experts.shared_by,
        SCATTERED=experts is not None and experts.scattered,
        # Of the tile alone. How many splits there are depends on rows, tiles and experts, and no
        # warm-up would meet each combination of it with a tile.
        MAY_SPLIT=block_m <= MAX_SPLIT_ROWS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **options,
    )
    return product


def tile_of(rows: float, weight: TiledWeight) -> tuple[int, int, dict[str, int]]:
    """Rows and outputs of a tile, and launch options, for the average rows of an expert."""
    if rows <= 16:
        # With zeros of each half of the bytes, a fifth stage spills registers on a B200.
        zeros = weight.form == INTEGER and weight.bits == 4 and weight.steps == 1
        return 16, 64, {"num_warps": 4, "num_stages": 4 if zeros else 5}
    if rows <= 32:
        return 32, 64, {"num_warps": 4, "num_stages": 4}
    if rows <= 64:
        return 64, 64, {"num_warps": 4, "num_stages": 4}
    # Of larger tiles, look-ups in a table spill registers, as do sums of a group that are scaled by
    # row and output.
    options = {"num_warps": 8, "num_stages": 3}
    if weight.fp8_inputs and weight.steps:
        return 64, 128, options
    return 128, 64 if weight.form == TABLE else 128, options
