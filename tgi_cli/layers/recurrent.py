"""The operations of layers that keep a state: C++ kernels on the CPU, or a reference in torch.

They take a flat batch and the slots of its step, read each sequence's state before its first token,
and leave it after its last one, and where a snapshot is due. References compute in float32, token
by token, and round once: neither the cut of a text into steps nor the sequences beside it change
a bit of a result on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tgi_cli.attention import StateCache
from tgi_cli.kernels import recurrence as kernels
from tgi_cli.kernels.linear import ACTIVATIONS
from tgi_cli.kernels.recurrence import ConvolutionLayer, DecayForm, GateLayer, RecurrenceLayer

L2_EPS = 1e-6
"""Added to the squares of queries and keys."""

_VECTOR = 64
"""Divisible by what torch computes at once on any CPU, unrolled."""


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
    before = states.load(layer, "conv")
    lengths = step.query_start_loc.diff()
    # All inputs in one tensor, each sequence's behind its earlier ones.
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


@dataclass(frozen=True, slots=True, eq=False)
class DeltaGates:
    """How a layer of the gated delta rule makes decays and gains of numbers a and b of a token.

    A head's state, or with ``channels`` each of its rows, is multiplied by exp(g) for a token:

    - ``softplus``: g = -rate * softplus(a + bias) (Gated DeltaNet, Kimi Delta Attention)
    - ``sigmoid``: g = floor * sigmoid(rate * (a + bias)) (Kimi Delta Attention with a lower bound)

    The gain is factor * sigmoid(b).

    Attributes:
        rate: float32 [heads], above 0.
        bias: float32 [heads], or [heads * key_dim] with ``channels``.
        channels: whether there is a decay for each row of a state.
        form: of g.
        floor: of g, below 0 (sigmoid).
        factor: of the gain.
    """

    rate: Tensor
    bias: Tensor
    channels: bool = False
    form: Literal["softplus", "sigmoid"] = "softplus"
    floor: float = 0.0
    factor: float = 1.0

    def decays(self, a: Tensor) -> Tensor:
        """exp(g) float32 of a [T, heads], or of [T, heads * key_dim] with channels."""
        rate = self.rate
        if self.channels:
            rate = rate.repeat_interleave(len(self.bias) // len(rate))
        a = a.float() + self.bias
        if self.form == "softplus":
            return by_rows(torch.exp, by_rows(F.softplus, a) * -rate)
        return by_rows(torch.exp, by_rows(torch.sigmoid, a * rate) * self.floor)

    def gains(self, b: Tensor) -> Tensor:
        """float32 of b [T, heads]."""
        return by_rows(torch.sigmoid, b.float()) * self.factor

    def layer(self, key_heads: int, key_dim: int, value_dim: int, eps: float) -> RecurrenceLayer:
        """The gated delta rule as kernels take it; see :func:`gated_delta`."""
        return RecurrenceLayer(
            heads=len(self.rate),
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            form=DecayForm.SOFTPLUS if self.form == "softplus" else DecayForm.SIGMOID,
            rate=self.rate,
            bias=self.bias,
            channels=self.channels,
            floor=0.0 if self.form == "softplus" else self.floor,
            beta_factor=self.factor,
            norm_eps=eps,
            scale=key_dim**-0.5,
        )


@dataclass(frozen=True, slots=True, eq=False)
class GivenGates:
    """As :class:`DeltaGates`, of logarithms of decays and of gains that are given as they are.

    Attributes:
        heads: of values.
        channels: whether there is a decay for each row of a state.
    """

    heads: int
    channels: bool = False

    def decays(self, a: Tensor) -> Tensor:
        """exp(a), float32."""
        return by_rows(torch.exp, a.float())

    def gains(self, b: Tensor) -> Tensor:
        """b in float32."""
        return b.float()

    def layer(self, key_heads: int, key_dim: int, value_dim: int, eps: float) -> RecurrenceLayer:
        """The gated delta rule as kernels take it; see :func:`gated_delta`."""
        return RecurrenceLayer(
            heads=self.heads,
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            form=DecayForm.GIVEN,
            channels=self.channels,
            norm_eps=eps,
            scale=key_dim**-0.5,
        )


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


@dataclass(frozen=True, slots=True, eq=False)
class StepSizes:
    """What the heads of a Mamba-2 layer make of a token's number dt.

    The step is softplus(dt + bias) within the bounds, the state's decay exp(-rate * step).

    Attributes:
        rate: float32 [heads], above 0.
        bias: float32 [heads].
        skip: float32 [heads], the factor of the input in the output.
        smallest, largest: bounds of a step.
    """

    rate: Tensor
    bias: Tensor
    skip: Tensor
    smallest: float = 0.0
    largest: float = math.inf

    def steps(self, dt: Tensor) -> Tensor:
        """float32 of dt [T, heads]."""
        return by_rows(F.softplus, dt.float() + self.bias).clamp(self.smallest, self.largest)

    def layer(self, groups: int, state_size: int, head_dim: int) -> RecurrenceLayer:
        """The model as kernels take it; see :func:`state_space`."""
        return RecurrenceLayer(
            heads=len(self.rate),
            key_heads=groups,
            key_dim=state_size,
            value_dim=head_dim,
            delta=False,
            rate=self.rate,
            bias=self.bias,
            skip=self.skip,
            floor=self.smallest,
            ceiling=self.largest,
        )


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
    wide, step = x.float(), sizes.steps(dt)
    decay = by_rows(torch.exp, step * -sizes.rate)[:, :, None, None]
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
        eps: of the norm.
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


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of [T, n], with the same bits however many rows there are.

    torch computes the last elements of a tensor one by one, by other approximations of exp than
    many at once: rows are padded so that none are left over.
    """
    rest = -x.shape[-1] % _VECTOR if x.device.type == "cpu" else 0
    if not rest:
        return function(x.contiguous())
    return function(F.pad(x, (0, rest)))[..., : x.shape[-1]]
