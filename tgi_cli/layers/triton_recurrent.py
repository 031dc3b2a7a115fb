"""Layers with a state in Triton, for CUDA: causal convolutions, the gated delta rule, Mamba-2.

They take a flat batch, read and write slots of states themselves, and compute the recurrent form. A
program has a sequence and a part of its state, which no other program reads or writes, and takes
the tokens one after the other. Decode and prefill run the same compiled kernel, so a result does
not depend on where a text is cut into steps, nor on what shares a step. Slots are read on the
device and grids depend on shapes alone: a CUDA graph can hold the launches. A row of padding, slots
-1 and -1, computes from a fresh state and writes none. Not measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.attention import StateMetadata
from tgi_cli.device.triton_launch import cached_launches
from tgi_cli.kernels.recurrence import ConvolutionLayer, RecurrenceLayer

_STEP = ["query_start_loc", "slots_in", "slots_out", "snapshot_after", "snapshot_slots"]
"""Their alignment differs from step to step, and would make the same kernel several times."""

_CONV_CHANNELS = 256
_CONV_TOKENS = 64
"""Tile of a program. Tokens are those of prefill, at least as many as a state has."""

_STATE_NUMBERS = 2048
"""Numbers of a state that one warp keeps in registers: 64 per thread."""


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["x_stride", "tile_tokens"], do_not_specialize_on_alignment=_STEP
)
def convolution_kernel(
    x: tl.tensor,  # [T, CHANNELS]
    weight: tl.tensor,  # float32 [TAPS, CHANNELS]
    bias: tl.tensor,  # float32 [CHANNELS]
    states: tl.tensor,  # [slots, TAPS - 1, CHANNELS], the oldest input first
    output: tl.tensor,  # [T, CHANNELS], contiguous
    query_start_loc: tl.tensor,  # int32 [B + 1]
    slots_in: tl.tensor,  # int64 [B]
    slots_out: tl.tensor,
    snapshot_after: tl.tensor,
    snapshot_slots: tl.tensor,
    x_stride: int,
    tile_tokens: int,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the power of 2 that is not below TAPS - 1
) -> None:
    """Grid: (blocks of channels, tiles of the longest sequence, B).

    The program of a sequence's first tile alone reads and writes its state.
    """
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile, sequence = tl.program_id(1), tl.program_id(2)
    inside = channels < CHANNELS
    begin = tl.load(query_start_loc + sequence).to(tl.int64)
    length = tl.load(query_start_loc + sequence + 1).to(tl.int64) - begin
    source = tl.load(slots_in + sequence)
    before = states + source * ((TAPS - 1) * CHANNELS) + channels
    own = x + begin * x_stride + channels
    first = tile.to(tl.int64) * tile_tokens
    for index in range(tl.minimum(first + tile_tokens, length) - first):
        place = first + index
        y = tl.zeros((BLOCK_C,), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            at = place - (TAPS - 1) + tap
            in_state = channels < tl.where((at < 0) & (source >= 0), CHANNELS, 0)
            in_step = channels < tl.where(at < 0, 0, CHANNELS)
            kept = tl.load(before + (TAPS - 1 + at) * CHANNELS, mask=in_state, other=0.0)
            new = tl.load(own + at * x_stride, mask=in_step, other=0.0)
            factor = tl.load(weight + tap * CHANNELS + channels, mask=inside, other=0.0)
            y += factor * tl.where(at < 0, kept, new).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias + channels, mask=inside, other=0.0)
        if SILU:
            y *= tl.sigmoid(y)
        to = output + (begin + place) * CHANNELS + channels
        tl.store(to, y.to(output.dtype.element_ty), mask=inside)
    if tile == 0:
        # The snapshot first: the state before the step may lie where that after it goes.
        count = tl.load(snapshot_after + sequence)
        slot = tl.load(snapshot_slots + sequence)
        rows = tl.arange(0, BLOCK_S)[:, None]
        valid = inside[None, :] & (rows < TAPS - 1)
        for _part in range(2):
            at = count - (TAPS - 1) + rows
            in_state = valid & (at < tl.where(source >= 0, 0, -TAPS))
            kept = tl.load(before[None, :] + (count + rows) * CHANNELS, mask=in_state, other=0.0)
            new = tl.load(own[None, :] + at * x_stride, mask=valid & (at >= 0), other=0.0)
            # No thread writes what another has yet to read.
            tl.debug_barrier()
            to = states + slot * ((TAPS - 1) * CHANNELS) + rows * CHANNELS + channels[None, :]
            written = valid & (rows < tl.where(slot >= 0, TAPS, 0))
            tl.store(to, tl.where(at < 0, kept, new), mask=written)
            count, slot = length, tl.load(slots_out + sequence)


def convolution(layer: ConvolutionLayer, x: Tensor, states: Tensor, step: StateMetadata) -> Tensor:
    """As :func:`tgi_cli.kernels.recurrence.convolution`, with an activation of ``silu`` or none."""
    taps, channels = layer.weight.shape
    x = _packed(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(channels), _CONV_CHANNELS)
    tokens = max(_CONV_TOKENS, taps)
    longest = max(step.query_lens_host)
    grid = (triton.cdiv(channels, block), triton.cdiv(longest, tokens), len(step.query_lens_host))
    convolution_kernel[grid](
        x,
        layer.weight,
        layer.weight if layer.bias is None else layer.bias,
        states,
        output,
        *_slots(step),
        x.stride(0),
        tokens,
        CHANNELS=channels,
        TAPS=taps,
        HAS_BIAS=layer.bias is not None,
        SILU=layer.activation is not None,
        BLOCK_C=block,
        BLOCK_S=triton.next_power_of_2(max(taps - 1, 1)),
        num_warps=max(block // 64, 1),
    )
    return output


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), precise where exp(x) is lost beside 1."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    lost = tl.log(whole) * (small / tl.maximum(whole - 1.0, 1e-30))
    return tl.maximum(x, 0.0) + tl.where(whole == 1.0, small, lost)


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=[
        "query_stride",
        "key_stride",
        "value_stride",
        "decay_stride",
        "beta_stride",
    ],
    do_not_specialize_on_alignment=_STEP,
)
def recurrence_kernel(
    query: tl.tensor,  # [T, KEY_HEADS, KEY_DIM], tokens strided
    key: tl.tensor,
    value: tl.tensor,  # [T, HEADS, VALUE_DIM]
    decay: tl.tensor,  # [T, HEADS], with CHANNELS [T, HEADS, KEY_DIM]
    beta: tl.tensor,  # [T, HEADS]
    rate: tl.tensor,  # float32 [HEADS]
    bias: tl.tensor,  # float32 [HEADS], with CHANNELS [HEADS, KEY_DIM]
    skip: tl.tensor,  # float32 [HEADS]
    states: tl.tensor,  # float32 [slots, HEADS, KEY_DIM, VALUE_DIM]
    output: tl.tensor,  # [T, HEADS, VALUE_DIM], contiguous
    query_start_loc: tl.tensor,  # int32 [B + 1]
    slots_in: tl.tensor,  # int64 [B]
    slots_out: tl.tensor,
    snapshot_after: tl.tensor,
    snapshot_slots: tl.tensor,
    query_stride: int,
    key_stride: int,
    value_stride: int,
    decay_stride: int,
    beta_stride: int,
    floor: float,
    ceiling: float,
    beta_factor: float,
    norm_eps: float,
    scale: float,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # heads that have the same key
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FORM: tl.constexpr,  # of kernels.recurrence.DecayForm
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_K: tl.constexpr,  # the power of 2 that is not below KEY_DIM
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid: (blocks of a state's columns, HEADS, B)."""
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, sequence = tl.program_id(1), tl.program_id(2)
    rows = tl.arange(0, BLOCK_K)
    known_rows, known_columns = rows < KEY_DIM, columns < VALUE_DIM
    inside = known_rows[:, None] & known_columns[None, :]
    own = states + head * (KEY_DIM * VALUE_DIM) + rows[:, None] * VALUE_DIM + columns[None, :]
    source = tl.load(slots_in + sequence)
    # Not multiplied by 0: a slot that is not read may hold NaN.
    readable = inside & (rows < tl.where(source >= 0, KEY_DIM, 0))[:, None]
    state = tl.load(own + source * (HEADS * KEY_DIM * VALUE_DIM), mask=readable, other=0.0)
    # The state may be written to where it was read: by no thread before all have read it.
    tl.debug_barrier()
    if FORM != 2:
        factor = tl.load(rate + head)
    if HAS_SKIP:
        kept_input = tl.load(skip + head)
    key_at = (head // SHARED) * KEY_DIM + rows
    value_at = head * VALUE_DIM + columns
    if CHANNELS:
        decay_at = head * KEY_DIM + rows
        decay_mask = known_rows
    else:
        decay_at = head
        decay_mask = head < HEADS
    if HAS_BIAS:
        offset = tl.load(bias + decay_at, mask=decay_mask, other=0.0)
    first = tl.load(query_start_loc + sequence).to(tl.int64)
    end = tl.load(query_start_loc + sequence + 1).to(tl.int64)
    # Tokens up to the snapshot, if there is one, then the others.
    stop = first + tl.load(snapshot_after + sequence)
    slot = tl.load(snapshot_slots + sequence)
    for _part in range(2):
        for token in range(first, stop):
            k = tl.load(key + token * key_stride + key_at, mask=known_rows, other=0.0)
            q = tl.load(query + token * query_stride + key_at, mask=known_rows, other=0.0)
            v = tl.load(value + token * value_stride + value_at, mask=known_columns, other=0.0)
            a = tl.load(decay + token * decay_stride + decay_at, mask=decay_mask, other=0.0)
            k, q, v, a = k.to(tl.float32), q.to(tl.float32), v.to(tl.float32), a.to(tl.float32)
            if NORM:
                k *= tl.rsqrt(tl.sum(k * k, 0) + norm_eps)
                q *= tl.rsqrt(tl.sum(q * q, 0) + norm_eps)
            q *= scale
            if HAS_BIAS:
                a += offset
            if FORM == 0:
                step = tl.minimum(tl.maximum(_softplus(a), floor), ceiling)
                a = -factor * step
            elif FORM == 1:
                a = floor * tl.sigmoid(factor * a)
            if CHANNELS:
                state *= tl.exp(a)[:, None]
            else:
                state *= tl.exp(a)
            if DELTA:
                gain = tl.load(beta + token * beta_stride + head).to(tl.float32)
                if FORM != 2:
                    gain = beta_factor * tl.sigmoid(gain)
                change = (v - tl.sum(state * k[:, None], 0)) * gain
            else:
                change = v * step
            state += k[:, None] * change[None, :]
            read = tl.sum(state * q[:, None], 0)
            if HAS_SKIP:
                read += kept_input * v
            to = output + token * (HEADS * VALUE_DIM) + value_at
            tl.store(to, read.to(output.dtype.element_ty), mask=known_columns)
        to = own + slot * (HEADS * KEY_DIM * VALUE_DIM)
        written = inside & (rows < tl.where(slot >= 0, KEY_DIM, 0))[:, None]
        tl.store(to, state, mask=written)
        first, stop, slot = stop, end, tl.load(slots_out + sequence)


def recurrence(
    layer: RecurrenceLayer,
    qkv: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    step: StateMetadata,
) -> Tensor:
    """As :func:`tgi_cli.kernels.recurrence.recurrence`, with keys of any size."""
    query, key, value = (_packed(x) for x in qkv)
    decay = _packed(decay)
    beta = None if beta is None else _packed(beta)
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    block_k = triton.next_power_of_2(layer.key_dim)
    block_v = min(triton.next_power_of_2(layer.value_dim), max(_STATE_NUMBERS // block_k, 8))
    grid = (triton.cdiv(layer.value_dim, block_v), layer.heads, len(step.query_lens_host))
    recurrence_kernel[grid](
        query,
        key,
        value,
        decay,
        decay if beta is None else beta,
        states if layer.rate is None else layer.rate,
        states if layer.bias is None else layer.bias,
        states if layer.skip is None else layer.skip,
        states,
        output,
        *_slots(step),
        query.stride(0),
        key.stride(0),
        value.stride(0),
        decay.stride(0),
        0 if beta is None else beta.stride(0),
        layer.floor,
        layer.ceiling,
        layer.beta_factor,
        0.0 if layer.norm_eps is None else layer.norm_eps,
        layer.scale,
        HEADS=layer.heads,
        SHARED=layer.heads // layer.key_heads,
        KEY_DIM=layer.key_dim,
        VALUE_DIM=layer.value_dim,
        FORM=int(layer.form),
        CHANNELS=layer.channels,
        DELTA=layer.delta,
        NORM=layer.norm_eps is not None,
        HAS_BIAS=layer.bias is not None,
        HAS_SKIP=layer.skip is not None,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=max(block_k * block_v // _STATE_NUMBERS, 1),
    )
    return output


def _slots(step: StateMetadata) -> tuple[Tensor, ...]:
    """A step's slots as kernels take them."""
    return (
        step.query_start_loc,
        step.slots_in,
        step.slots_out,
        step.snapshot_after,
        step.snapshot_slots,
    )


def _packed(x: Tensor) -> Tensor:
    """[T, ...], the numbers of each token contiguous."""
    inner = (1,) if x.dim() == 2 else (x.shape[2], 1)
    return x if x.stride()[1:] == inner else x.contiguous()
