"""Triton kernels that write the paged cache and a step's metadata; 8-bit floats by their bits.

The bits of 8-bit floats (https://arxiv.org/abs/2209.05433) are made here rather than by casts:
GPUs before compute capability 8.9 have none, and too large numbers must saturate everywhere as in
:mod:`tgi_cli.attention.fp8`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches

NOT_FP8, E4M3_BITS, E5M2_BITS, E4M3_CAST, E5M2_CAST = range(5)
"""How a cache is read: as it is; uint8 codes from their bits; by the GPU's casts."""
_E4M3_BITS = tl.constexpr(E4M3_BITS)
_E5M2_BITS = tl.constexpr(E5M2_BITS)
_E4M3_CAST = tl.constexpr(E4M3_CAST)
_E5M2_CAST = tl.constexpr(E5M2_CAST)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def widened(stored: tl.tensor, dtype: tl.constexpr, FP8: tl.constexpr) -> tl.tensor:
    """What a cache holds, exactly, in a wider dtype."""
    if FP8 == _E4M3_CAST:
        stored = stored.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FP8 == _E5M2_CAST:
        stored = stored.to(tl.float8e5, bitcast=True).to(dtype)
    elif FP8 == _E5M2_BITS:
        # Its bits are the upper half of a float16's.
        stored = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif FP8 == _E4M3_BITS:
        # An exponent of 4 bits read as one of 5 bits, with a bias that is greater by 8.
        code = stored.to(tl.uint16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        number = bits.to(tl.float16, bitcast=True) * 256.0
        number = tl.where((code & 0x7F) == 0x7F, float("nan"), number)
        stored = number.to(dtype)
    return stored


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def narrowed(numbers: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """float32 to uint8 codes as :func:`tgi_cli.attention.fp8.to_fp8` has them."""
    MANTISSA: tl.constexpr = 3 if FP8 == _E4M3_BITS else 2
    BIAS: tl.constexpr = 7 if FP8 == _E4M3_BITS else 15
    LARGEST: tl.constexpr = 448.0 if FP8 == _E4M3_BITS else 57344.0
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = numbers.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(numbers), LARGEST)
    kept = magnitude.to(tl.uint32, bitcast=True)
    # Round to nearest, ties to even; a carry goes to the exponent, where it belongs.
    odd = (kept >> SHIFT) & 1
    normal = ((kept + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # A number whose last bit is worth what a subnormal's is: to add it is to round.
    MAGIC: tl.constexpr = 2.0 ** (24 - MANTISSA - BIAS)
    MAGIC_BITS: tl.constexpr = (24 - MANTISSA - BIAS + 127) << 23
    small = (magnitude + MAGIC).to(tl.uint32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), small, normal)
    code = code | ((bits >> 31) << 7)
    return tl.where(numbers != numbers, 0x7F, code).to(tl.uint8)


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_kernel(
    key: tl.tensor,  # [T, heads, HEAD_DIM]
    value: tl.tensor,
    key_cache: tl.tensor,  # [slots, heads * HEAD_DIM]
    value_cache: tl.tensor,  # [slots, heads * VALUE_DIM]
    slots: tl.tensor,  # int64 [T]
    key_factor: float,  # with FP8: what numbers are multiplied by before they are rounded
    value_factor: float,
    key_stride: int,
    key_head_stride: int,
    value_stride: int,
    value_head_stride: int,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # 0: values are part of the keys
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < HEADS * HEAD_DIM
        head, dim = columns // HEAD_DIM, columns % HEAD_DIM
        key_at = key + token * key_stride + head * key_head_stride + dim
        new_key = tl.load(key_at, mask=inside, other=0.0)
        if FP8 > 0:
            new_key = narrowed(new_key.to(tl.float32) * key_factor, FP8)
        tl.store(key_cache + slot * (HEADS * HEAD_DIM) + columns, new_key, mask=inside)
        if VALUE_DIM > 0:
            inside = columns < HEADS * VALUE_DIM
            head, dim = columns // VALUE_DIM, columns % VALUE_DIM
            value_at = value + token * value_stride + head * value_head_stride + dim
            new_value = tl.load(value_at, mask=inside, other=0.0)
            if FP8 > 0:
                new_value = narrowed(new_value.to(tl.float32) * value_factor, FP8)
            tl.store(value_cache + slot * (HEADS * VALUE_DIM) + columns, new_value, mask=inside)


_READ = {
    torch.float8_e4m3fn: (E4M3_BITS, E4M3_CAST),
    torch.float8_e5m2: (E5M2_BITS, E5M2_CAST),
}


def how_to_read(cache_dtype: torch.dtype, casts: bool) -> int:
    """The FP8 of the kernels, for a GPU with or without casts. Written are always bits."""
    return _READ.get(cache_dtype, (NOT_FP8, NOT_FP8))[casts]


def write_cache(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    fp8: int,
    factors: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Put [T, heads, head_dim] into slots (int64 [T]); negative ones are left out.

    Caches are contiguous [blocks, block_size, heads, head_dim], as uint8 if ``fp8`` is E4M3_BITS
    or E5M2_BITS, to which keys and values are rounded after they are multiplied by ``factors``.
    Values, which may be of another width, are None where they are part of the keys.
    """
    tokens, heads, head_dim = key.shape
    value_dim = 0 if value is None else value.shape[2]
    if value is None:
        value = key
    size = heads * max(head_dim, value_dim)
    if not tokens or not size:
        return
    block = min(triton.next_power_of_2(size), 1024)
    _write_kernel[(tokens, triton.cdiv(size, block))](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *factors,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        FP8=fp8,
        BLOCK=block,
        num_warps=max(block // 256, 1),
    )


@cached_launches
@triton.jit(do_not_specialize=["count", "width"])  # type: ignore[untyped-decorator, unused-ignore]
def _stage_kernel(
    kv_lens: tl.tensor,  # [count]
    slots: tl.tensor,
    table: tl.tensor,  # [count, width]
    kv_lens_to: tl.tensor,
    slots_to: tl.tensor,
    table_to: tl.tensor,
    count: int,
    width: int,
    table_stride: int,
    table_to_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows, blocks of columns). Copies ``count`` rows; those after become padding."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    real = row < count
    if block == 0:
        tl.store(kv_lens_to + row, tl.load(kv_lens + row, mask=real, other=0))
        tl.store(slots_to + row, tl.load(slots + row, mask=real, other=-1))
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < tl.where(real, width, 0)
    blocks = tl.load(table + row * table_stride + columns, mask=inside, other=0)
    tl.store(table_to + row * table_to_stride + columns, blocks, mask=inside)


def stage(
    kv_lens: Tensor,
    slots: Tensor,
    table: Tensor,
    kv_lens_to: Tensor,
    slots_to: Tensor,
    table_to: Tensor,
    rows: int,
) -> None:
    """Copy the metadata of decodes to fixed addresses, in one launch.

    Of the first ``rows`` rows there, those that there are none for here become padding: KV length
    0, slot -1.
    """
    count, width = table.shape
    block = min(triton.next_power_of_2(max(width, 1)), 1024)
    _stage_kernel[(rows, max(triton.cdiv(width, block), 1))](
        kv_lens,
        slots,
        table,
        kv_lens_to,
        slots_to,
        table_to,
        count,
        width,
        table.stride(0),
        table_to.stride(0),
        BLOCK=block,
        num_warps=4,
    )


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["kv_lens", "table", "starts"],
)
def _pages_kernel(
    table: tl.tensor,  # [rows, blocks]
    kv_lens: tl.tensor,  # [rows]
    starts: tl.tensor,  # [rows + 1]
    pages: tl.tensor,
    table_stride: int,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows,)."""
    row = tl.program_id(0)
    begin = tl.load(starts + row)
    count = tl.load(starts + row + 1) - begin
    first = begin * 0
    if WINDOW > 0:
        first = tl.maximum(tl.load(kv_lens + row) - WINDOW, 0) // BLOCK_SIZE
    source = table + row.to(tl.int64) * table_stride + first
    for at in range(0, count, BLOCK):
        own = at + tl.arange(0, BLOCK)
        mask = own < count
        tl.store(pages + begin + own, tl.load(source + own, mask=mask, other=0), mask=mask)


def list_pages(
    table: Tensor, kv_lens: Tensor, starts: Tensor, pages: Tensor, window: int, block_size: int
) -> None:
    """Put the blocks that decodes see one after the other, in one launch.

    Args:
        table: block table, int32 [B, blocks].
        kv_lens: int32 [B].
        starts: int32 [B + 1]: where each sequence's begin in ``pages``.
        pages: int32; written.
        window: positions that a query sees; 0: all.
        block_size: tokens of a block.
    """
    _pages_kernel[(len(kv_lens),)](
        table,
        kv_lens,
        starts,
        pages,
        table.stride(0),
        WINDOW=window,
        BLOCK_SIZE=block_size,
        BLOCK=256,
        num_warps=4,
    )
