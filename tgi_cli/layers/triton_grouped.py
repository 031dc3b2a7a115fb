"""The grouped product as one Triton kernel, for devices and dtypes that torch has none for.

The grid is as large as any way of choosing experts could need; a program finds its expert and
its rows in the ends of the groups, and the surplus ones return at once. So a launch depends on
the number of pairs alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches
from tgi_cli.quantization.tiled_weight import ExpertRows


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _grouped_kernel(
    x: tl.tensor,  # [P, K], rows sorted by expert
    weight: tl.tensor,  # [E, N, K]
    bias: tl.tensor,  # [E, N]
    ends: tl.tensor,  # [E]
    pairs: tl.tensor,  # int32 [P]: see ExpertRows
    product: tl.tensor,  # [P, N]
    x_stride: int,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_E: tl.constexpr,  # the power of 2 that is not below E
    HAS_BIAS: tl.constexpr,
    SHARED_BY: tl.constexpr,
    SCATTERED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Tiles of the same expert's rows run side by side, so that its weight is read once.
    tile, column = tl.program_id(0), tl.program_id(1)
    experts = tl.arange(0, PADDED_E)
    last = tl.load(ends + experts, mask=experts < E, other=0)
    first = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (tl.maximum(last - first, 0) + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if expert < E:
        own = experts == expert
        start = tl.sum(tl.where(own, first + (tile - tile_ends + tiles) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(own, last, 0), 0)
        rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        in_group, in_width = rows < end, columns < N
        sources = rows
        if SHARED_BY > 0 or SCATTERED:
            pair = tl.load(pairs + rows, mask=in_group, other=0).to(tl.int64)
            if SHARED_BY > 0:
                sources = pair // SHARED_BY
        x_tile = x + sources[:, None] * x_stride + inner[None, :]
        base = weight + expert.to(tl.int64) * N * K
        weight_tile = base + columns[None, :].to(tl.int64) * K + inner[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            in_depth = inner < K - k
            a = tl.load(x_tile + k, mask=in_group[:, None] & in_depth[None, :], other=0.0)
            b = tl.load(weight_tile + k, mask=in_width[None, :] & in_depth[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision=PRECISION)
        if HAS_BIAS:
            added = tl.load(bias + expert * N + columns, mask=in_width, other=0.0)
            sums += added[None, :].to(tl.float32)
        targets = pair if SCATTERED else rows
        place = product + targets[:, None] * N + columns[None, :]
        tl.store(
            place,
            sums.to(product.dtype.element_ty),
            mask=in_group[:, None] & in_width[None, :],
        )


def triton_grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: ExpertRows
) -> Tensor:
    """As :func:`tgi_cli.layers.grouped.looped_linear`, of bfloat16, float16 or float32.

    ``weight`` and ``bias`` are contiguous.
    """
    pairs, (num_experts, out, depth) = len(rows.pairs), weight.shape
    product = x.new_empty(pairs, out)
    if not pairs:
        return product
    block_m, block_n, block_k, options = _blocks(pairs, num_experts, x.dtype)
    # Every expert with rows may leave one tile unfilled.
    tiles = min(pairs, pairs // block_m + num_experts)
    _grouped_kernel[(tiles, triton.cdiv(out, block_n))](
        x,
        weight,
        weight if bias is None else bias,
        rows.ends,
        rows.pairs,
        product,
        x.stride(0),
        E=num_experts,
        N=out,
        K=depth,
        PADDED_E=triton.next_power_of_2(num_experts),
        HAS_BIAS=bias is not None,
        SHARED_BY=rows.shared_by,
        SCATTERED=rows.scattered,
        # float32 would be rounded to 10 bits of mantissa otherwise.
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **options,
    )
    return product


def _blocks(
    pairs: int, num_experts: int, dtype: torch.dtype
) -> tuple[int, int, int, dict[str, int]]:
    """Tile sizes and launch options, for as many rows as an expert gets on average.

    With few rows it is the weights' way from memory that takes time: narrow tiles make more
    programs of it, each with several loads under way.
    """
    rows = pairs / num_experts
    if dtype == torch.float32:
        return (16 if rows <= 16 else 32), 64, 32, {"num_warps": 4, "num_stages": 3}
    if rows <= 16:
        return 16, 64, 128, {"num_warps": 4, "num_stages": 4}
    if rows <= 64:
        return 64, 128, 64, {"num_warps": 4, "num_stages": 3}
    return 128, 128, 64, {"num_warps": 8, "num_stages": 3}
