"""Products of a dense weight with few rows, in one Triton kernel.

With up to 64 rows, a product takes as long as its weight takes to be read. The kernel streams the
weight once through shared memory, in tiles that have all rows of the input beside them. Where a
weight has fewer tiles of outputs than a GPU runs programs, several programs share the inputs of a
tile, and the last one of them to finish adds up the parts, in their order.

How the inputs are cut depends on the shape of the weight alone, and a row's sums on nothing but the
row: within a tile size (16, 32 or 64 rows) a row's result is the same to the last bit whatever rows
are beside it. Other tile sizes sum up the same parts in the same order; that a tensor core's
instructions for tiles of other widths do not round otherwise is not documented.

On GPUs that start a kernel before the last one has ended
(:mod:`tgi_cli.device.dependent_launch`), the kernel has the first tiles of the weight fetched into
the second-level cache meanwhile: the memory, which would be idle while a norm or an activation
computes, reads what the product needs next. Before it waits, the kernel does nothing else, and
each of its programs waits.

Not measured on a GPU; a server measures it at warm-up
(:mod:`tgi_cli.worker.sizing.product_choice`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tgi_cli.device.dependent_launch import fetch_lines
from tgi_cli.device.triton_launch import cached_launches
from tgi_cli.quantization import split_inputs

MAX_ROWS = 64
BLOCK_N = 64
BLOCK_K = 128
_FETCHED_BLOCKS = tl.constexpr(4)
"""Blocks of inputs whose weights are fetched before the wait: 64 KiB of a program, which an H100's
memory reads for all programs in about the time of two small kernels."""
_LINE = tl.constexpr(128)
"""Bytes of a line of the second-level cache."""


@cached_launches
@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator, unused-ignore]
def _few_rows_kernel(
    x: tl.tensor,  # [rows, K]
    weight: tl.tensor,  # [N, K]
    bias: tl.tensor,  # [N]
    product: tl.tensor,  # [rows, N]
    parts: tl.tensor,  # float32 [tiles, splits, BLOCK_N, BLOCK_M]
    arrived: tl.tensor,  # int32 [tiles], zeros
    rows: int,
    N: int,
    K: int,
    x_stride: int,
    splits: int,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether K is a multiple of BLOCK_K
    SPLIT: tl.constexpr,  # whether there are several splits
    DEPENDENT: tl.constexpr,  # whether the kernel is launched before the last one has ended
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,  # not below rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid: (tiles of outputs, splits)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(K, BLOCK_K)
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = columns < N
    starts = weight + columns.to(tl.int64) * K
    if DEPENDENT:
        PER_LINE: tl.constexpr = _LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = _FETCHED_BLOCKS * BLOCK_K // PER_LINE
        inputs = first * BLOCK_K + tl.arange(0, LINES) * PER_LINE
        # Beyond the program's part, its last line once more: no other address is sure to be there.
        inputs = tl.minimum(inputs, tl.minimum(last * BLOCK_K, K) - 1)
        own = weight + tl.minimum(columns, N - 1).to(tl.int64) * K
        fetch_lines(own[:, None] + inputs[None, :])
        gdc_wait()
    numbers = tl.arange(0, BLOCK_M)
    in_rows = numbers < rows
    inner = tl.arange(0, BLOCK_K)
    weight_at = starts[:, None] + first * BLOCK_K + inner[None, :]
    x_at = x + numbers.to(tl.int64)[None, :] * x_stride + first * BLOCK_K + inner[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(first, last):
        of_weight, of_x = in_width[:, None], in_rows[None, :]
        if not EVEN_K:
            inside = inner < K - block * BLOCK_K
            of_weight &= inside[None, :]
            of_x &= inside[:, None]
        w = tl.load(weight_at, mask=of_weight, other=0.0)
        a = tl.load(x_at, mask=of_x, other=0.0)
        sums = tl.dot(w, a, sums, input_precision=PRECISION)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    done = True
    if SPLIT:
        at = numbers[None, :] + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M
        of_tile = parts + tile.to(tl.int64) * splits * (BLOCK_N * BLOCK_M) + at
        tl.store(of_tile + split * (BLOCK_N * BLOCK_M), sums)
        tl.debug_barrier()  # all of it, before this program counts as done
        done = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
    if done:
        if SPLIT:
            tl.store(arrived + tile, 0)  # as the next launch expects it
            sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for other in range(0, splits):
                # Not from the first-level cache: other multiprocessors wrote it.
                sums += tl.load(of_tile + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        if HAS_BIAS:
            added = tl.load(bias + columns, mask=in_width, other=0.0)
            sums += added.to(tl.float32)[:, None]
        tl.store(
            product + numbers.to(tl.int64)[None, :] * N + columns[:, None],
            sums.to(product.dtype.element_ty),
            mask=in_width[:, None] & in_rows[None, :],
        )


def few_rows_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dependent: bool = False
) -> Tensor:
    """x [T, K] times weight [N, K], plus ``bias`` [N]: [T, N].

    Args:
        x: of at most 64 rows, bfloat16 or float16 (or float32, for tests).
        weight: of the same dtype and on the same device, contiguous.
        bias: contiguous.
        dependent: whether to start before the kernel before has ended, where
            :func:`~tgi_cli.device.dependent_launch.has_dependent_launch`.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    product = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return product
    block_m, options = tile_of(rows)
    tiles, splits = -(-outputs // BLOCK_N), num_splits(outputs, inputs)
    arrived = split_inputs.counters(x.device)
    parts = arrived.view(torch.float32)  # not written, but of the dtype that is compiled for
    if splits > 1:
        count = tiles * splits * BLOCK_N * block_m
        parts = torch.empty(count, dtype=torch.float32, device=x.device)
    _few_rows_kernel[(tiles, splits)](
        x,
        weight,
        weight if bias is None else bias,
        product,
        parts,
        arrived,
        rows,
        outputs,
        inputs,
        x.stride(0),
        splits,
        HAS_BIAS=bias is not None,
        EVEN_K=inputs % BLOCK_K == 0,
        SPLIT=splits > 1,
        DEPENDENT=dependent,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        **options,
        **({"launch_pdl": True} if dependent else {}),
    )
    return product


def tile_of(rows: int) -> tuple[int, dict[str, int]]:
    """Rows of a tile, and launch options."""
    if rows <= 16:
        return 16, {"num_warps": 4, "num_stages": 4}
    if rows <= 32:
        return 32, {"num_warps": 4, "num_stages": 3}
    assert rows <= MAX_ROWS
    return MAX_ROWS, {"num_warps": 4, "num_stages": 3}


def num_splits(outputs: int, inputs: int) -> int:
    """Programs that share the inputs of a tile: the same for any number of rows."""
    return split_inputs.num_splits(-(-outputs // BLOCK_N), -(-inputs // BLOCK_K))
