"""Sorting of tokens by expert, or by adapter, as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches


@cached_launches
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator, unused-ignore]
def _sort_kernel(
    chosen: tl.tensor,  # int32 [count]
    ends: tl.tensor,  # int32 [E]
    pairs: tl.tensor,  # int32 [count]
    count: int,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (E,). Each program counts what precedes its expert, then lists its own pairs.

    Negative numbers are of no expert.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        found = tl.load(chosen + start + lanes, mask=start + lanes < count, other=-1)
        found = tl.where(found < 0, 1 << 30, found)
        before += (found < expert).to(tl.int32)
        equal += (found == expert).to(tl.int32)
    place = tl.sum(before, 0)
    own_count = tl.sum(equal, 0)
    tl.store(ends + expert, place + own_count)
    if own_count > 0:
        for start in range(0, count, BLOCK):
            found = tl.load(chosen + start + lanes, mask=start + lanes < count, other=-1)
            own = (found == expert).to(tl.int32)
            tl.store(pairs + place + tl.cumsum(own, 0) - own, start + lanes, mask=own > 0)
            place += tl.sum(own, 0)


def sort_pairs(
    chosen: Tensor, num_experts: int, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Sort pairs of a token and an expert by expert; those of one stay in order.

    Args:
        chosen: integers [T, k], contiguous; negative ones are of no expert.
        num_experts: E.
        out: memory for the result.

    Returns:
        ``ends`` int32 [E] and ``pairs`` int32 [P] of
        :class:`tgi_cli.quantization.tiled_weight.ExpertRows`. Pairs of no expert are in none of
        the groups, and the last entries are not written.
    """
    count = chosen.numel()
    if out is None:
        ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
        pairs = torch.empty(count, dtype=torch.int32, device=chosen.device)
    else:
        ends, pairs = out
    _sort_kernel[(num_experts,)](chosen, ends, pairs, count, BLOCK=1024, num_warps=4)
    return ends, pairs
