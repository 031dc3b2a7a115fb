"""Rounding of activations to e4m3 in one Triton kernel, for GPUs that have the cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches

_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantize_kernel(
    x: tl.tensor,  # [T, groups * SIZE]
    codes: tl.tensor,  # e4m3 [T, groups * SIZE]
    scales: tl.tensor,  # float32 [T, groups]
    x_stride: int,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (T, groups)."""
    row, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lanes = tl.arange(0, BLOCK)
    x += row * x_stride + group * SIZE
    codes += (row * groups + group) * SIZE
    high = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        columns = start + lanes
        number = tl.load(x + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        high = tl.maximum(high, tl.abs(number))
    scale = tl.maximum(tl.max(high, 0), 1e-12) / _LARGEST
    for start in range(0, SIZE, BLOCK):
        columns = start + lanes
        number = tl.load(x + columns, mask=columns < SIZE, other=0.0).to(tl.float32) / scale
        number = tl.minimum(tl.maximum(number, -_LARGEST), _LARGEST)
        tl.store(codes + columns, number.to(codes.dtype.element_ty), mask=columns < SIZE)
    tl.store(scales + row * groups + group, scale)


def quantize_rows(x: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """x [T, K] as e4m3 [T, K], with scales float32 [T, groups] of neighbours in a row.

    A scale maps the largest number of its group to e4m3's. x is contiguous in a row.
    """
    rows, size = x.shape[0], x.shape[1] // groups
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(size), 4096)
        _quantize_kernel[(rows, groups)](
            x,
            codes,
            scales,
            x.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )
    return codes, scales
