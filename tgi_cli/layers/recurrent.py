"""The operations of layers that keep a state: kernels, or a reference in torch.

They take a flat batch and the slots of its step, read each sequence's state before its first token,
and leave it after its last one, and where a snapshot is due. On CUDA the kernels are Triton's
(:mod:`tgi_cli.layers.triton_recurrent`), on a CPU those in C++. References compute in float32,
token by token, and round once: neither the cut of a text into steps nor the sequences beside it
change a bit of a result on a CPU.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from tgi_cli.attention import StateCache, StateMetadata
from tgi_cli.kernels import recurrence as kernels
from tgi_cli.kernels import scan
from tgi_cli.kernels.linear import ACTIVATIONS
from tgi_cli.kernels.recurrence import ConvolutionLayer, GateLayer
from tgi_cli.layers import chunked, ops
from tgi_cli.layers.gates import DeltaGates, GivenGates, StepSizes, by_rows

L2_EPS = 1e-6
"""Added to the squares of queries and keys."""


def triton_for(x: Tensor) -> ModuleType | None:
    """The kernels for ``x`` on CUDA; None on a CPU, or where Triton cannot compile."""
    if not x.is_cuda or ops.triton_kernels() is None:
        return None
    from tgi_cli.layers import triton_recurrent

    return triton_recurrent


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    states: StateCache,
    layer: int,
) -> Tensor:
    """A convolution over the tokens of each sequence, channel by channel.

    y[t] = act(bias + sum_j weight[j] * x[t - size + 1 + j]), of zeros before a text's beginning.

    Args:
        x: [T, channels]; rows may be strided.
        weight: float32 [size, channels].
        bias: float32 [channels], or None.
        activation: ``silu`` or None.
        states: has [size - 1, channels] of each sequence, the oldest input first, as ``conv``.
        layer: index of its states.

    Returns:
        [T, channels] in x's dtype.
    """
    step = states.step
    assert step is not None
    size, kept = len(weight), len(weight) - 1
    own = states.tensors[layer]["conv"]
    if size <= kernels.MAX_TAPS and activation in (None, *ACTIVATIONS) and kernels.usable(x, own):
        convolution = ConvolutionLayer(weight, bias, activation)
        return kernels.convolution(convolution, x, own, step.for_kernels())
    if (triton := triton_for(x)) is not None:
        convolution = ConvolutionLayer(weight, bias, activation)
        convolved: Tensor = triton.convolution(convolution, x, own, step)
        return convolved
    before = states.load(layer, "conv")
    lengths = step.query_start_loc.diff()
    # All inputs in one tensor, each sequence's after its earlier ones.
    sequence = torch.repeat_interleave(lengths, output_size=len(x))
    first = torch.arange(len(x), device=x.device) + sequence * kept
    own = step.query_start_loc[:-1] + torch.arange(len(lengths), device=x.device) * kept
    rows = torch.arange(kept, device=x.device)
    inputs = x.new_empty(len(x) + before.shape[0] * kept, x.shape[1])
    inputs[first + kept] = x
    inputs[own[:, None] + rows] = before
    # Products and sums one by one: fused ones are rounded otherwise, and torch fuses only some.
    y = weight[0] * inputs[first].float()
    for tap in range(1, size):
        y += weight[tap] * inputs[first + tap].float()
    if bias is not None:
        y += bias
    if activation is not None:
        y = by_rows(F.silu, y)
    states.store(layer, "conv", inputs[(own + lengths)[:, None] + rows])
    if step.has_snapshots:
        after = (own + step.snapshot_after)[:, None] + rows
        states.store(layer, "conv", inputs[after], snapshots=True)
    return y.to(x.dtype)


def gated_delta(
    qkv: tuple[Tensor, Tensor, Tensor],
    a: Tensor,
    b: Tensor,
    gates: DeltaGates | GivenGates,
    states: StateCache,
    layer: int,
    eps: float = L2_EPS,
) -> Tensor:
    """The gated delta rule over the tokens of each sequence, in its recurrent form.

    Per head a state S [key_dim, value_dim] in float32, and per token
    ``S *= decay; S += k (gain (v - S^T k))^T; o = S^T q / sqrt(key_dim)``, with queries and keys
    of length 1. https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2510.26692

    Args:
        qkv: queries and keys [T, key_heads, key_dim], values [T, heads, value_dim]; tokens may be
            strided. As many value heads as share a key head are adjacent.
        a, b: what ``gates`` takes.
        gates: decays and gains.
        states: has [heads, key_dim, value_dim] of each sequence as ``recurrent``.
        layer: index of its states.
        eps: added to the squares of queries and keys.

    Returns:
        [T, heads, value_dim] in the values' dtype.
    """
    own, (_, key_heads, key_dim) = states.tensors[layer]["recurrent"], qkv[1].shape
    if key_dim <= kernels.MAX_KEY_DIM and kernels.usable(*qkv, a, b):
        assert states.step is not None
        rule = gates.layer(key_heads, key_dim, qkv[2].shape[2], eps)
        return kernels.recurrence(rule, qkv, a, b, own, states.step.for_kernels())
    if (triton := triton_for(qkv[2])) is not None:
        rule = gates.layer(key_heads, key_dim, qkv[2].shape[2], eps)

        def recurrent(tokens: slice, part: StateMetadata) -> Tensor:
            some = (qkv[0][tokens], qkv[1][tokens], qkv[2][tokens])
            read: Tensor = triton.recurrence(rule, some, a[tokens], b[tokens], own, part)
            return read

        if states.in_chunks and eps == chunked.NORM_EPS:
            return chunked.gated_delta(qkv, a, b, gates, own, states.planned, recurrent)
        return recurrent(slice(None), states.planned)
    value = qkv[2].float()
    shared = value.shape[1] // qkv[0].shape[1]
    query, key = (
        (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)).repeat_interleave(shared, 1)
        for x in (qkv[0].float(), qkv[1].float())
    )
    query = query.mul_(query.shape[-1] ** -0.5)
    decay = gates.decays(a).view(len(value), value.shape[1], -1, 1)
    gain = gates.gains(b)[..., None]
    output = torch.empty_like(value)

    # All tensors of a token have one shape, whatever is in the batch: so have all sums one order.
    def run(tokens: slice, state: Tensor) -> None:
        for t in range(tokens.start, tokens.stop):
            state.mul_(decay[t])
            known = (state * key[t, :, :, None]).sum(1)
            change = (value[t] - known).mul_(gain[t])
            state.addcmul_(key[t, :, :, None], change[:, None])
            torch.sum(state * query[t, :, :, None], 1, out=output[t])

    states.advance(layer, "recurrent", run)
    return output.to(qkv[2].dtype)


def state_space(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    sizes: StepSizes,
    states: StateCache,
    layer: int,
) -> Tensor:
    """A Mamba-2 state space model over the tokens of each sequence, in its recurrent form.

    Per head a state S [state_size, head_dim] in float32, and per token
    ``S = decay * S + B (step * x)^T; y = S^T C + skip * x``. https://arxiv.org/abs/2405.21060

    Args:
        x: [T, heads, head_dim]; tokens may be strided.
        b, c: [T, groups, state_size]. As many heads as share a group are adjacent.
        dt: [T, heads].
        sizes: steps and decays.
        states: has [heads, state_size, head_dim] of each sequence as ``recurrent``.
        layer: index of its states.

    Returns:
        [T, heads, head_dim] in x's dtype.
    """
    own, (_, groups, state_size) = states.tensors[layer]["recurrent"], b.shape
    if state_size <= kernels.MAX_KEY_DIM and kernels.usable(x, b, c, dt):
        assert states.step is not None
        model = sizes.layer(groups, state_size, x.shape[2])
        return kernels.recurrence(model, (c, b, x), dt, None, own, states.step.for_kernels())
    if (triton := triton_for(x)) is not None:
        model = sizes.layer(groups, state_size, x.shape[2])

        def recurrent(tokens: slice, part: StateMetadata) -> Tensor:
            some = (c[tokens], b[tokens], x[tokens])
            read: Tensor = triton.recurrence(model, some, dt[tokens], None, own, part)
            return read

        if states.in_chunks:
            return chunked.state_space(x, b, c, dt, sizes, own, states.planned, recurrent)
        return recurrent(slice(None), states.planned)
    wide, step = x.float(), sizes.steps(dt)
    decay = sizes.decays(step)[:, :, None, None]
    scaled = (wide * step[..., None]).view(len(x), groups, -1, 1, x.shape[2])
    b, c = (part.float()[:, :, None, :, None] for part in (b, c))
    output = torch.empty_like(wide)

    # All tensors of a token have one shape, as in gated_delta.
    def run(tokens: slice, state: Tensor) -> None:
        grouped = state.view(b.shape[1], -1, *state.shape[1:])
        for t in range(tokens.start, tokens.stop):
            state.mul_(decay[t])
            grouped.addcmul_(scaled[t], b[t])
            torch.sum(grouped * c[t], 2, out=output[t].view(*grouped.shape[:2], -1))

    states.advance(layer, "recurrent", run)
    return output.add_(wide * sizes.skip[:, None]).to(x.dtype)


def selective_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: StateCache,
    layer: int,
) -> Tensor:
    """A Mamba state space model over the tokens of each sequence, in its recurrent form.

    Per channel a state S [n] in float32, and per token ``S = exp(step * a) S + step * x * b;
    y = S c``. https://arxiv.org/abs/2312.00752

    Args:
        x, step: float32 [T, channels].
        a: float32 [channels, n].
        b, c: float32 [T, n].
        states: has [channels, n] of each sequence as ``recurrent``.
        layer: index of its states.

    Returns:
        float32 [T, channels].
    """
    own, planned = states.tensors[layer]["recurrent"], states.planned
    x, step, a, b, c = (part.contiguous() for part in (x, step, a, b, c))
    if kernels.usable(x, own):
        return scan.selective_scan(x, step, a, b, c, own, planned.for_kernels())
    if triton_for(x) is not None:
        from tgi_cli.layers import triton_scan

        return triton_scan.selective_scan(x, step, a, b, c, own, planned)
    output, scaled = torch.empty_like(x), step * x

    def run(tokens: slice, state: Tensor) -> None:
        for t in range(tokens.start, tokens.stop):
            state.mul_((step[t, :, None] * a).exp_())
            state.addcmul_(scaled[t, :, None], b[t])
            torch.sum(state * c[t], 1, out=output[t])

    states.advance(layer, "recurrent", run)
    return output


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str = "silu",
    *,
    gate_first: bool = False,
) -> Tensor:
    """An RMS norm of groups of a row, gated: norm(x) * act(gate), or norm(x * act(gate)).

    Args:
        x, gate: [T, groups, size]; tokens may be strided.
        weight: [size], or [groups, size].
        eps: epsilon of the norm.
        activation: ``silu`` or ``sigmoid``.
        gate_first: whether the gate is applied before the norm (Mamba-2) or after it.

    Returns:
        [T, groups, size] in x's dtype.
    """
    if kernels.usable(x, gate):
        return kernels.gate(GateLayer(activation, weight.float(), eps, gate_first), x, gate)
    function = F.silu if activation == "silu" else torch.sigmoid
    factors = by_rows(function, gate.float().flatten(1)).view(gate.shape)
    wide = x.float()
    if gate_first:
        wide = wide * factors
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    normed = wide * squares.div_(x.shape[-1]).add_(eps).rsqrt_() * weight.float()
    output: Tensor = normed if gate_first else normed.mul_(factors)
    return output.to(x.dtype)
