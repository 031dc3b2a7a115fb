"""Layers with a state in C++, for bfloat16 and float32 on the CPU: convolutions, linear attention.

Each takes a flat batch and the slots of its step, reads the states of the sequences before it and
writes those after it, and snapshots. A token's numbers depend, to the last bit, on its own sequence
alone: not on where that is cut into steps, on what shares a step, or on the number of threads.
Tokens may be strided; the numbers of a token are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.linear import ACTIVATIONS

MAX_TAPS = 8
MAX_KEY_DIM = 256
DTYPES = (torch.bfloat16, torch.float32)


class SlotArgs(Structure):
    """``StateStep`` of ``cpp/states.h``."""

    _fields_ = (
        ("sequences", c_int64),
        ("tokens", c_int64),
        ("query_start", c_void_p),
        ("slots_in", c_void_p),
        ("slots_out", c_void_p),
        ("snapshot_after", c_void_p),
        ("snapshot_slots", c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepSlots:
    """The slots of a step, in tensors that live as long as this does."""

    args: SlotArgs
    kept: tuple[Tensor, ...]

    @classmethod
    def of(cls, tokens: int, query_start_loc: Tensor, slots: Sequence[Tensor]) -> StepSlots:
        """From int32 [B+1], and the slots in and out, tokens before snapshots, and their slots.

        The latter are int64 [B], as those of ``attention.StateMetadata``.
        """
        kept = (query_start_loc.int().contiguous(), *(each.long().contiguous() for each in slots))
        pointers = (tensor.data_ptr() for tensor in kept)
        return cls(SlotArgs(len(query_start_loc) - 1, tokens, *pointers), kept)


def usable(*inputs: Tensor) -> bool:
    """Whether the kernels take these inputs of one layer."""
    first = inputs[0].dtype
    return (
        first in DTYPES
        and all(x.dtype == first and x.device.type == "cpu" for x in inputs)
        and cpp_library() is not None
    )


class ConvolutionArgs(Structure):
    """``Convolution`` of ``cpp/convolution.h``."""

    _fields_ = (
        ("x", c_void_p),
        ("before", c_void_p),
        ("after", c_void_p),
        ("output", c_void_p),
        ("x_stride", c_int64),
        ("before_stride", c_int64),
        ("after_stride", c_int64),
        ("output_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("states", c_void_p),
        ("channels", c_int64),
        ("taps", c_int64),
        ("wide", c_int32),
        ("activation", c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionLayer:
    """A depthwise causal convolution.

    Attributes:
        weight: float32 [taps, channels], contiguous, that of the newest input last; at most
            :data:`MAX_TAPS` taps.
        bias: float32 [channels], or None.
        activation: by transformers' name, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str | None = None

    def args(self) -> ConvolutionArgs:
        """The layer's own fields, for inputs in bfloat16."""
        taps, channels = self.weight.shape
        return ConvolutionArgs(
            weight=self.weight.data_ptr(),
            bias=_pointer(self.bias),
            channels=channels,
            taps=taps,
            activation=-1 if self.activation is None else ACTIVATIONS[self.activation],
        )


def convolution(
    layer: ConvolutionLayer,
    x: Tensor,
    states: Tensor,
    slots: StepSlots,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """after * act(conv(before * x)) of [T, channels] each; no ``before`` or ``after`` is 1.

    ``states`` [slots, taps - 1, channels] in x's dtype, contiguous, has the last inputs (before
    times x), the newest last.
    """
    assert states.is_contiguous()
    assert states.dtype == x.dtype
    given = [None if each is None else _rows(each) for each in (x, before, after)]
    output = torch.empty(x.shape, dtype=x.dtype)
    call = layer.args()
    for name, each in zip(("x", "before", "after"), given, strict=True):
        setattr(call, name, _pointer(each))
        setattr(call, f"{name}_stride", 0 if each is None else each.stride(0))
    call.output, call.output_stride = output.data_ptr(), output.stride(0)
    call.states, call.wide = states.data_ptr(), x.dtype == torch.float32
    _library().tgi_convolution(byref(call), byref(slots.args), threads())
    return output


class DecayForm(IntEnum):
    """How a decay comes from a number a of a token, as ``cpp/recurrence.h`` numbers them."""

    SOFTPLUS = 0
    """exp(-rate step) of the step softplus(a + bias), bounded"""
    SIGMOID = 1
    """exp(floor sigmoid(rate (a + bias)))"""
    GIVEN = 2
    """exp(a); then the gains of the delta rule are given as they are, too"""


class RecurrenceArgs(Structure):
    """``Recurrence`` of ``cpp/recurrence.h``."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("decay", c_void_p),
        ("beta", c_void_p),
        ("output", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("decay_stride", c_int64),
        ("beta_stride", c_int64),
        ("output_stride", c_int64),
        ("rate", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
        ("states", c_void_p),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("wide", c_int32),
        ("wide_gates", c_int32),
        ("delta", c_int32),
        ("channels", c_int32),
        ("form", c_int32),
        ("floor", c_float),
        ("ceiling", c_float),
        ("beta_factor", c_float),
        ("norm_eps", c_float),
        ("scale", c_float),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecurrenceLayer:
    """Linear attention: the gated delta rule, or a state space model with a decay per head.

    Tensors are float32 and contiguous.

    Attributes:
        heads, key_heads: of values, and of queries and keys; heads that share one are adjacent.
        key_dim, value_dim: of a head; keys have at most :data:`MAX_KEY_DIM`.
        delta: the delta rule; otherwise keys times steps times values are added up.
        form: form of decays.
        rate: [heads], above 0; None if decays are given.
        bias: [heads], with ``channels`` [heads * key_dim], or None.
        skip: [heads], of the values that are added to the output, or None.
        channels: whether each row of a state has a decay.
        floor, ceiling: of steps; of the sigmoid form the least logarithm of a decay.
        beta_factor: of the sigmoid that is the delta rule's gain.
        norm_eps: added to the squares of queries and keys, whose lengths become 1; None: none do.
        scale: factor of queries.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool = True
    form: DecayForm = DecayForm.SOFTPLUS
    rate: Tensor | None = None
    bias: Tensor | None = None
    skip: Tensor | None = None
    channels: bool = False
    floor: float = 0.0
    ceiling: float = float("inf")
    beta_factor: float = 1.0
    norm_eps: float | None = None
    scale: float = 1.0

    def args(self) -> RecurrenceArgs:
        """The layer's own fields, for inputs in bfloat16."""
        return RecurrenceArgs(
            rate=_pointer(self.rate),
            bias=_pointer(self.bias),
            skip=_pointer(self.skip),
            heads=self.heads,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            delta=self.delta,
            channels=self.channels,
            form=self.form,
            floor=self.floor,
            ceiling=self.ceiling,
            beta_factor=self.beta_factor,
            norm_eps=-1.0 if self.norm_eps is None else self.norm_eps,
            scale=self.scale,
        )


def recurrence(
    layer: RecurrenceLayer,
    qkv: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    slots: StepSlots,
) -> Tensor:
    """Linear attention over the tokens of each sequence, one after the other.

    Args:
        qkv: [T, key_heads, key_dim] twice and [T, heads, value_dim], of one dtype. (C, B and x of a
            state space model.)
        decay: [T, heads], with ``channels`` [T, heads * key_dim].
        beta: [T, heads] of decay's dtype, of the delta rule alone.
        states: float32 [slots, heads, key_dim, value_dim], contiguous.

    Returns:
        [T, heads, value_dim] in the values' dtype.
    """
    assert states.is_contiguous()
    assert states.dtype == torch.float32
    assert (beta is not None) == layer.delta
    query, key, value = (_tokens(x) for x in qkv)
    decay = _rows(decay)
    if beta is not None:
        beta = _rows(beta)
        assert beta.dtype == decay.dtype
    output = torch.empty(value.shape, dtype=value.dtype)
    call = layer.args()
    call.query, call.query_stride = query.data_ptr(), query.stride(0)
    call.key, call.key_stride = key.data_ptr(), key.stride(0)
    call.value, call.value_stride = value.data_ptr(), value.stride(0)
    call.decay, call.decay_stride = decay.data_ptr(), decay.stride(0)
    call.beta, call.beta_stride = _pointer(beta), 0 if beta is None else beta.stride(0)
    call.output, call.output_stride = output.data_ptr(), output.stride(0)
    call.states = states.data_ptr()
    call.wide, call.wide_gates = value.dtype == torch.float32, decay.dtype == torch.float32
    _library().tgi_recurrence(byref(call), byref(slots.args), threads())
    return output


class GateArgs(Structure):
    """``Gate`` of ``cpp/gate.h``."""

    _fields_ = (
        ("x", c_void_p),
        ("gate", c_void_p),
        ("output", c_void_p),
        ("x_stride", c_int64),
        ("gate_stride", c_int64),
        ("output_stride", c_int64),
        ("weight", c_void_p),
        ("weight_stride", c_int64),
        ("groups", c_int64),
        ("width", c_int64),
        ("wide", c_int32),
        ("activation", c_int32),
        ("gate_first", c_int32),
        ("per_group", c_int32),
        ("eps", c_float),
    )


@dataclass(frozen=True, slots=True, eq=False)
class GateLayer:
    """A gate, with an RMS norm of each group of a token's numbers or without.

    Attributes:
        activation: activation of the gate, by transformers' name.
        weight: weight of the norm, float32 [width] or [groups, width]; None: there is no norm.
        eps: epsilon of the norm.
        gate_first: norm(x * act(gate)) instead of norm(x) * act(gate).
        per_group: the gate is one number per group.
    """

    activation: str
    weight: Tensor | None = None
    eps: float = 0.0
    gate_first: bool = False
    per_group: bool = False

    def args(self, groups: int, width: int) -> GateArgs:
        """The layer's own fields, for inputs in bfloat16."""
        weight = self.weight
        return GateArgs(
            weight=_pointer(weight),
            weight_stride=0 if weight is None or weight.dim() == 1 else width,
            groups=groups,
            width=width,
            activation=ACTIVATIONS[self.activation],
            gate_first=self.gate_first,
            per_group=self.per_group,
            eps=self.eps,
        )


def gate(layer: GateLayer, x: Tensor, by: Tensor) -> Tensor:
    """x [T, groups, width], gated by as many numbers, or ``per_group`` by [T, groups, 1]."""
    x, by = _tokens(x), _tokens(by)
    output = torch.empty(x.shape, dtype=x.dtype)
    call = layer.args(x.shape[1], x.shape[2])
    call.x, call.x_stride = x.data_ptr(), x.stride(0)
    call.gate, call.gate_stride = by.data_ptr(), by.stride(0)
    call.output, call.output_stride = output.data_ptr(), output.stride(0)
    call.wide = x.dtype == torch.float32
    _library().tgi_gate(byref(call), c_int64(len(x)), threads())
    return output


def _library() -> CDLL:
    library = cpp_library()
    assert library is not None
    return library


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()


def _rows(x: Tensor) -> Tensor:
    """[T, n], each token's numbers contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _tokens(x: Tensor) -> Tensor:
    """[T, heads, n], each token's numbers contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
