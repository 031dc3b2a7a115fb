"""What adapters add to a linear layer as two Triton launches, each row by its own adapter alone.

Rows are sorted by their slots once a step; tokens without adapter are in no tile. The first product
(to the rank) is split among programs over its inputs, as there are few tiles; the second adds up
the parts in their order, multiplies by B, and adds to the layer's outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches
from tgi_cli.quantization.triton_product import place

_BLOCK_M = 16
_BLOCK_N = 128
_BLOCK_K = 128
_PROGRAMS = 132
"""Programs that the first launch should have: one for each multiprocessor of an H100."""
_MAX_SPLITS = 16


@cached_launches
@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator, unused-ignore]
def _shrink_kernel(
    x: tl.tensor,  # [T, inputs]
    a: tl.tensor,  # [parts, SLOTS, RANK, inputs]
    ends: tl.tensor,  # int32 [SLOTS]
    pairs: tl.tensor,  # int32 [T]
    inner: tl.tensor,  # float32 [splits, parts, T, RANK], rows sorted by slot
    rows: int,
    inputs: int,
    x_stride: int,
    splits: int,
    SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid: (tiles of rows, parts, splits)."""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, start, end = place(tile, ends, rows, SLOTS, PADDED_SLOTS, BLOCK_M)
    if start < end:
        own = start + tl.arange(0, BLOCK_M)
        in_rows = own < end
        tokens = tl.load(pairs + own, mask=in_rows, other=0).to(tl.int64)
        ranks = tl.arange(0, PADDED_RANK)
        in_rank = ranks < RANK
        a_at = a + ((part * SLOTS + slot) * RANK + ranks).to(tl.int64)[None, :] * inputs
        x_at = x + tokens[:, None] * x_stride
        blocks = (inputs + BLOCK_K - 1) // BLOCK_K
        sums = tl.zeros((BLOCK_M, PADDED_RANK), dtype=tl.float32)
        for block in range(split * blocks // splits, (split + 1) * blocks // splits):
            k = block * BLOCK_K + tl.arange(0, BLOCK_K)
            in_k = k < inputs
            x_tile = tl.load(x_at + k[None, :], mask=in_rows[:, None] & in_k[None, :], other=0.0)
            a_tile = tl.load(a_at + k[:, None], mask=in_rank[None, :] & in_k[:, None], other=0.0)
            sums = tl.dot(x_tile.to(a_tile.dtype), a_tile, sums, input_precision=PRECISION)
        row = (split * tl.num_programs(1) + part).to(tl.int64) * rows + own
        at = inner + row[:, None] * RANK + ranks[None, :]
        tl.store(at, sums, mask=in_rows[:, None] & in_rank[None, :])


@cached_launches
@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator, unused-ignore]
def _expand_kernel(
    y: tl.tensor,  # [T, outputs], to which is added
    b: tl.tensor,  # [SLOTS, RANK, outputs]
    owners: tl.tensor,  # int32 [outputs]: the part of each output
    ends: tl.tensor,  # int32 [SLOTS]
    pairs: tl.tensor,  # int32 [T]
    inner: tl.tensor,  # float32 [splits, PARTS, T, RANK]
    rows: int,
    outputs: int,
    y_stride: int,
    splits: int,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid: (tiles of rows, tiles of outputs)."""
    tile, column = tl.program_id(0), tl.program_id(1)
    slot, start, end = place(tile, ends, rows, SLOTS, PADDED_SLOTS, BLOCK_M)
    if start < end:
        own = start + tl.arange(0, BLOCK_M)
        in_rows = own < end
        tokens = tl.load(pairs + own, mask=in_rows, other=0).to(tl.int64)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        in_width = columns < outputs
        owner = tl.load(owners + columns, mask=in_width, other=-1)
        ranks = tl.arange(0, PADDED_RANK)
        in_rank = ranks < RANK
        b_at = b + (slot * RANK + ranks).to(tl.int64)[:, None] * outputs + columns[None, :]
        b_tile = tl.load(b_at, mask=in_rank[:, None] & in_width[None, :], other=0.0)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            if tl.max((owner == part).to(tl.int32), 0) > 0:
                reduced = tl.zeros((BLOCK_M, PADDED_RANK), dtype=tl.float32)
                for split in range(0, splits):
                    row = (split * PARTS + part) * rows + own
                    at = inner + row.to(tl.int64)[:, None] * RANK + ranks[None, :]
                    reduced += tl.load(at, mask=in_rows[:, None] & in_rank[None, :], other=0.0)
                mine = tl.where((owner == part)[None, :], b_tile, 0.0).to(b_tile.dtype)
                sums = tl.dot(reduced.to(b_tile.dtype), mine, sums, input_precision=PRECISION)
        y_at = y + tokens[:, None] * y_stride + columns[None, :]
        mask = in_rows[:, None] & in_width[None, :]
        before = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_at, (before + sums).to(y.dtype.element_ty), mask=mask)


def add_(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    owners: Tensor,
    ends: Tensor,
    pairs: Tensor,
) -> None:
    """Add to y [T, outputs] what each token's adapter makes of x [T, inputs].

    Args:
        a: [parts, slots * rank, inputs], contiguous.
        b: [slots * rank, outputs], contiguous.
        owners: int32 [outputs], the part of each output.
        ends: int32 [slots], see :func:`tgi_cli.layers.triton_sort.sort_pairs`.
        pairs: int32 [T], the tokens sorted by slot, those without one last.
    """
    tokens, inputs = x.shape
    slots, parts, outputs = len(ends), len(a), y.shape[1]
    rank = a.shape[1] // slots
    if not tokens or not slots:
        return
    tiles = min(tokens, tokens // _BLOCK_M + slots)
    blocks = triton.cdiv(inputs, _BLOCK_K)
    splits = max(1, min(_PROGRAMS // (tiles * parts), blocks // 2, _MAX_SPLITS))
    inner = torch.empty(splits, parts, tokens, rank, dtype=torch.float32, device=x.device)
    common = {
        "SLOTS": slots,
        "PADDED_SLOTS": triton.next_power_of_2(slots),
        "RANK": rank,
        "PADDED_RANK": max(16, triton.next_power_of_2(rank)),
        "PRECISION": "ieee" if a.dtype == torch.float32 else "tf32",
        "BLOCK_M": _BLOCK_M,
    }
    _shrink_kernel[(tiles, parts, splits)](
        x,
        a,
        ends,
        pairs,
        inner,
        tokens,
        inputs,
        x.stride(0),
        splits,
        **common,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        num_stages=3,
    )
    _expand_kernel[(tiles, triton.cdiv(outputs, _BLOCK_N))](
        y,
        b,
        owners,
        ends,
        pairs,
        inner,
        tokens,
        outputs,
        y.stride(0),
        splits,
        PARTS=parts,
        **common,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
        num_stages=2,
    )
