"""The selective scan of Mamba in Triton, for CUDA, in its recurrent form.

As :mod:`tgi_cli.layers.triton_recurrent`, with which it shares how slots are read and written: a
program has a sequence and some channels, and takes the tokens one after the other. Not measured on
a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.attention import StateMetadata
from tgi_cli.device.triton_launch import cached_launches

_STATE_NUMBERS = 1024
"""Numbers of a program's states, which one warp keeps in registers: 32 per thread."""


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["x_stride", "step_stride", "b_stride", "c_stride"],
    do_not_specialize_on_alignment=[
        "query_start_loc",
        "slots_in",
        "slots_out",
        "snapshot_after",
        "snapshot_slots",
    ],
)
def scan_kernel(
    x: tl.tensor,  # [T, CHANNELS], tokens strided
    steps: tl.tensor,
    a: tl.tensor,  # float32 [CHANNELS, SIZE], contiguous
    b: tl.tensor,  # [T, SIZE]
    c: tl.tensor,
    states: tl.tensor,  # float32 [slots, CHANNELS, SIZE]
    output: tl.tensor,  # float32 [T, CHANNELS], contiguous
    query_start_loc: tl.tensor,  # int32 [B + 1]
    slots_in: tl.tensor,  # int64 [B]
    slots_out: tl.tensor,
    snapshot_after: tl.tensor,
    snapshot_slots: tl.tensor,
    x_stride: int,
    step_stride: int,
    b_stride: int,
    c_stride: int,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the power of 2 that is not below SIZE
) -> None:
    """Grid: (blocks of channels, B)."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    sequence = tl.program_id(1)
    columns = tl.arange(0, BLOCK_S)
    known_channels, known_columns = channels < CHANNELS, columns < SIZE
    inside = known_channels[:, None] & known_columns[None, :]
    places = channels[:, None] * SIZE + columns[None, :]
    rates = tl.load(a + places, mask=inside, other=0.0)
    source = tl.load(slots_in + sequence)
    readable = inside & (columns < tl.where(source >= 0, SIZE, 0))[None, :]
    state = tl.load(states + source * (CHANNELS * SIZE) + places, mask=readable, other=0.0)
    # The state may be written to where it was read: by no thread before all have read it.
    tl.debug_barrier()
    first = tl.load(query_start_loc + sequence).to(tl.int64)
    end = tl.load(query_start_loc + sequence + 1).to(tl.int64)
    stop = first + tl.load(snapshot_after + sequence)
    slot = tl.load(snapshot_slots + sequence)
    for _part in range(2):
        for token in range(first, stop):
            value = tl.load(x + token * x_stride + channels, mask=known_channels, other=0.0)
            step = tl.load(steps + token * step_stride + channels, mask=known_channels, other=0.0)
            key = tl.load(b + token * b_stride + columns, mask=known_columns, other=0.0)
            query = tl.load(c + token * c_stride + columns, mask=known_columns, other=0.0)
            step = step.to(tl.float32)
            change = (step * value.to(tl.float32))[:, None] * key.to(tl.float32)[None, :]
            state = tl.exp(step[:, None] * rates) * state + change
            read = tl.sum(state * query.to(tl.float32)[None, :], 1)
            tl.store(output + token * CHANNELS + channels, read, mask=known_channels)
        to = states + slot * (CHANNELS * SIZE) + places
        written = inside & (columns < tl.where(slot >= 0, SIZE, 0))[None, :]
        tl.store(to, state, mask=written)
        first, stop, slot = stop, end, tl.load(slots_out + sequence)


def selective_scan(
    x: Tensor,
    steps: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    step: StateMetadata,
) -> Tensor:
    """Mamba's state space model over the tokens of each sequence, float32 [T, channels].

    Args:
        x, steps: [T, channels], the numbers of a token contiguous.
        a: float32 [channels, n], contiguous.
        b, c: [T, n], the numbers of a token contiguous.
        states: float32 [slots, channels, n], contiguous.
        step: the slots.
    """
    tokens, channels = x.shape
    size = a.shape[1]
    output = torch.empty((tokens, channels), dtype=torch.float32, device=x.device)
    block_s = triton.next_power_of_2(size)
    block_c = min(triton.next_power_of_2(channels), max(_STATE_NUMBERS // block_s, 1))
    scan_kernel[(triton.cdiv(channels, block_c), len(step.query_lens_host))](
        x,
        steps,
        a,
        b,
        c,
        states,
        output,
        step.query_start_loc,
        step.slots_in,
        step.slots_out,
        step.snapshot_after,
        step.snapshot_slots,
        x.stride(0),
        steps.stride(0),
        b.stride(0),
        c.stride(0),
        CHANNELS=channels,
        SIZE=size,
        BLOCK_C=block_c,
        BLOCK_S=block_s,
        num_warps=1,
    )
    return output
