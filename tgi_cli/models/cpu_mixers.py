"""Emits the mixers of a decoder's layers as operations of a program."""

from __future__ import annotations

from torch import nn

from tgi_cli.kernels.linear import ACTIVATIONS
from tgi_cli.kernels.program_parts import BufferView, RecurrenceViews, Rope
from tgi_cli.kernels.recurrence import MAX_KEY_DIM, MAX_TAPS, ConvolutionLayer, GateLayer
from tgi_cli.layers import Attention
from tgi_cli.layers.conv import CausalConv
from tgi_cli.layers.delta import DeltaNet
from tgi_cli.layers.latent import LatentAttention
from tgi_cli.layers.recurrent import L2_EPS
from tgi_cli.layers.short_conv import ShortConv
from tgi_cli.layers.ssm import SSM
from tgi_cli.models.cpu_attention import emit_attention, emit_latent
from tgi_cli.models.cpu_emitter import Emitter, Output, UnsupportedLayer


def emit_mixer(
    emitter: Emitter,
    label: str,
    mixer: nn.Module,
    rope: Rope | None,
    source: BufferView,
    output: Output,
) -> None:
    """Add the operations of a mixer.

    Raises:
        UnsupportedLayer: there are none for it.
    """
    if isinstance(mixer, Attention):
        emit_attention(emitter, label, mixer, rope, source, output)
    elif isinstance(mixer, DeltaNet):
        _delta(emitter, label, mixer, source, output)
    elif isinstance(mixer, SSM):
        _state_space(emitter, label, mixer, source, output)
    elif isinstance(mixer, ShortConv):
        _short_conv(emitter, label, mixer, source, output)
    elif isinstance(mixer, LatentAttention):
        emit_latent(emitter, label, mixer, rope, source, output)
    else:
        raise UnsupportedLayer(f"{label}: {type(mixer).__name__}")


def _convolution(label: str, conv: CausalConv) -> ConvolutionLayer:
    if conv.activation not in (None, *ACTIVATIONS):
        raise UnsupportedLayer(f"{label}: {conv.activation}")
    if conv.size > MAX_TAPS:
        raise UnsupportedLayer(f"{label}: a convolution of {conv.size} tokens")
    return ConvolutionLayer(conv.weight, conv.bias, conv.activation)


def _delta(
    emitter: Emitter, label: str, mixer: DeltaNet, source: BufferView, output: Output
) -> None:
    keys, _, values = mixer.widths
    heads, program = mixer.num_heads, emitter.program
    if mixer.key_dim > MAX_KEY_DIM:
        raise UnsupportedLayer(f"{label}: keys of {mixer.key_dim} dimensions")
    qkvz = emitter.buffer("qkvz", mixer.qkvz_proj.out_features)
    ba = emitter.buffer("ba", mixer.ba_proj.out_features)
    qkv = emitter.buffer("convolved", sum(mixer.widths))
    read = emitter.buffer("attended", values)
    emitter.linear(f"{label}.qkvz_proj", mixer.qkvz_proj, source, qkvz)
    emitter.linear(f"{label}.ba_proj", mixer.ba_proj, source, ba)
    if mixer.low_rank is None:
        decay, gate = ba.at(heads), qkvz.at(2 * keys + values)
    else:
        low_rank = mixer.low_rank
        low = emitter.buffer("low_rank", 2 * low_rank.rank)
        decay, gate = emitter.buffer("decays", keys), emitter.buffer("gates", values)
        emitter.linear(f"{label}.a_proj", low_rank.a_proj, source, low)
        emitter.linear(f"{label}.f_b_proj", low_rank.f_b_proj, low, decay)
        emitter.linear(f"{label}.g_b_proj", low_rank.g_b_proj, low.at(low_rank.rank), gate)
    convolution = _convolution(f"{label}.conv", mixer.conv)
    program.convolve(f"{label}.conv", qkvz, qkv, convolution, mixer.layer)
    views = RecurrenceViews(qkv, qkv.at(keys), qkv.at(2 * keys), decay=decay, beta=ba)
    key_heads = keys // mixer.key_dim
    rule = mixer.decay.gates.layer(key_heads, mixer.key_dim, mixer.value_dim, L2_EPS)
    program.recur(f"{label}.recur", views, read, rule, mixer.layer)
    norm = GateLayer(mixer.norm.activation, mixer.norm.weight.float(), mixer.norm.eps)
    program.gate(f"{label}.norm_gate", read, gate, read, norm, heads, mixer.value_dim)
    emitter.project(f"{label}.out_proj", mixer.out_proj, read, output)


def _state_space(
    emitter: Emitter, label: str, mixer: SSM, source: BufferView, output: Output
) -> None:
    program, norm = emitter.program, mixer.norm
    if mixer.state_size > MAX_KEY_DIM:
        raise UnsupportedLayer(f"{label}: states of {mixer.state_size} rows")
    gate_width, mixed_width, _ = mixer.widths
    x, b, _ = mixer.mixed_widths
    projected = emitter.buffer("in", sum(mixer.widths))
    mixed = emitter.buffer("convolved", mixed_width)
    read = emitter.buffer("attended", x)
    emitter.linear(f"{label}.in_proj", mixer.in_proj, source, projected)
    convolution = _convolution(f"{label}.conv1d", mixer.conv1d)
    program.convolve(f"{label}.conv", projected.at(gate_width), mixed, convolution, mixer.layer)
    decay = projected.at(gate_width + mixed_width)
    views = RecurrenceViews(query=mixed.at(x + b), key=mixed.at(x), value=mixed, decay=decay)
    model = mixer.heads.steps.layer(b // mixer.state_size, mixer.state_size, mixer.head_dim)
    program.recur(f"{label}.recur", views, read, model, mixer.layer)
    weight = norm.weight.float().view(-1, norm.width)
    layer = GateLayer("silu", weight, norm.eps, gate_first=True)
    program.gate(f"{label}.norm_gate", read, projected, read, layer, len(weight), norm.width)
    emitter.project(f"{label}.out_proj", mixer.out_proj, read, output)


def _short_conv(
    emitter: Emitter, label: str, mixer: ShortConv, source: BufferView, output: Output
) -> None:
    channels = mixer.conv.weight.shape[1]
    projected = emitter.buffer("in", 3 * channels)
    mixed = emitter.buffer("convolved", channels)
    emitter.linear(f"{label}.in_proj", mixer.in_proj, source, projected)
    emitter.program.convolve(
        f"{label}.conv",
        projected.at(2 * channels),
        mixed,
        _convolution(f"{label}.conv", mixer.conv),
        mixer.layer,
        before=projected,
        after=projected.at(channels),
    )
    emitter.project(f"{label}.out_proj", mixer.out_proj, mixed, output)
