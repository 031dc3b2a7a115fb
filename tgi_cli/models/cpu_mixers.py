"""Emits the mixers of a decoder's layers as operations of a program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tgi_cli.kernels.linear import ACTIVATIONS, Epilogue
from tgi_cli.kernels.program import BufferView, HeadLayout, RecurrenceViews
from tgi_cli.kernels.recurrence import MAX_KEY_DIM, MAX_TAPS, ConvolutionLayer, GateLayer
from tgi_cli.layers import Attention
from tgi_cli.layers.conv import CausalConv
from tgi_cli.layers.delta import DeltaNet
from tgi_cli.layers.latent import LatentAttention
from tgi_cli.layers.linear import LinearBase
from tgi_cli.layers.recurrent import L2_EPS
from tgi_cli.layers.short_conv import ShortConv
from tgi_cli.layers.ssm import SSM
from tgi_cli.models.cpu_emitter import Emitter, UnsupportedLayer


@dataclass(frozen=True, slots=True)
class Output:
    """Where a block's result goes, and how."""

    target: BufferView
    epilogue: Epilogue = Epilogue.STORE
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """A layer's rotation: the rope's index and how many dimensions it rotates."""

    index: int
    rotated: int


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
        _attention(emitter, label, mixer, rope, source, output)
    elif isinstance(mixer, DeltaNet):
        _delta(emitter, label, mixer, source, output)
    elif isinstance(mixer, SSM):
        _state_space(emitter, label, mixer, source, output)
    elif isinstance(mixer, ShortConv):
        _short_conv(emitter, label, mixer, source, output)
    elif isinstance(mixer, LatentAttention):
        _latent(emitter, label, mixer, rope, source, output)
    else:
        raise UnsupportedLayer(f"{label}: {type(mixer).__name__}")


def _project(
    emitter: Emitter, label: str, layer: LinearBase, source: BufferView, output: Output
) -> None:
    target, epilogue, scale = output.target, output.epilogue, output.scale
    emitter.linear(label, layer, source, target, epilogue, scale=scale)


def _attention(
    emitter: Emitter,
    label: str,
    attention: Attention,
    rope: Rope | None,
    source: BufferView,
    output: Output,
) -> None:
    if attention.head_gate is not None:
        raise UnsupportedLayer(f"{label}: a gate with one number per head")
    if not attention.plain or attention.slopes is not None:
        raise UnsupportedLayer(f"{label}: attention of another form")
    num_heads, num_kv_heads = attention.heads
    dims = attention.head_dim
    heads = HeadLayout(attention.layer, num_heads, num_kv_heads, dims)
    qkv = emitter.buffer("qkv", sum(attention.widths))
    attended = emitter.buffer("attended", num_heads * dims)
    emitter.linear(f"{label}.qkv_proj", attention.qkv_proj, source, qkv)
    weight, eps = None, 0.0
    if attention.q_norm is not None and attention.k_norm is not None:
        keys = qkv.at(num_heads * dims)
        emitter.norm(f"{label}.q_norm", attention.q_norm, qkv, qkv)
        emitter.norm(f"{label}.k_norm", attention.k_norm, keys, keys)
    elif attention.qk_norm is not None:
        weight, eps = attention.qk_norm.weight.float(), attention.qk_norm.eps
    emitter.program.rotate(
        f"{label}.rotate",
        qkv,
        heads,
        rope=None if rope is None else rope.index,
        rotated=0 if rope is None else rope.rotated,
        weight=weight,
        eps=eps,
    )
    emitter.program.attend(
        f"{label}.attend",
        qkv,
        attended,
        heads,
        scale=attention.scale,
        window=attention.kv_spec.window,
        chunk=attention.kv_spec.chunk,
        softcap=attention.softcap,
        sinks=None if attention.sinks is None else attention.sinks.weight.float(),
    )
    if attention.output_gate:
        gate = qkv.at((num_heads + 2 * num_kv_heads) * dims)
        sigmoid = GateLayer("sigmoid")
        emitter.program.gate(f"{label}.gate", attended, gate, attended, sigmoid, num_heads, dims)
    _project(emitter, f"{label}.o_proj", attention.o_proj, attended, output)


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
    _project(emitter, f"{label}.out_proj", mixer.out_proj, read, output)


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
    _project(emitter, f"{label}.out_proj", mixer.out_proj, read, output)


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
    _project(emitter, f"{label}.out_proj", mixer.out_proj, mixed, output)


def _latent(
    emitter: Emitter,
    label: str,
    mixer: LatentAttention,
    rope: Rope | None,
    source: BufferView,
    output: Output,
) -> None:
    if mixer.indexer is not None:
        raise UnsupportedLayer(f"{label}: sparse attention")
    expansion, program = mixer.kv_b_proj, emitter.program
    if expansion.packed_keys is None or expansion.packed_values is None:
        raise UnsupportedLayer(f"{label}: its weights are not packed for the kernels")
    num_heads, rank, plain = mixer.num_heads, mixer.rank, mixer.key_dim
    width, head_dim = rank + mixer.rope_dim, plain + mixer.rope_dim
    heads = HeadLayout(mixer.layer, num_heads, 1, width, rank)
    query = emitter.buffer("query", num_heads * head_dim)
    if mixer.q_a_layernorm is None:
        row = emitter.buffer("latent", width)
        emitter.linear(f"{label}.q_proj", mixer.q_proj, source, query)
        emitter.linear(f"{label}.kv_a_proj", mixer.kv_a_proj, source, row)
    else:
        short = emitter.buffer("latents", mixer.q_a_layernorm.size + width)
        row = short.at(mixer.q_a_layernorm.size)
        emitter.linear(f"{label}.qkv_a_proj", mixer.qkv_a_proj, source, short)
        emitter.norm(f"{label}.q_a_norm", mixer.q_a_layernorm, short, short)
        emitter.linear(f"{label}.q_b_proj", mixer.q_b_proj, short, query)
    emitter.norm(f"{label}.kv_a_norm", mixer.kv_a_layernorm, row, row)
    absorbed = emitter.buffer("absorbed", num_heads * width)
    attended = emitter.buffer("attended", num_heads * rank)
    values = emitter.buffer("values", num_heads * expansion.value_dim)
    program.heads(f"{label}.absorb", query, absorbed, expansion.packed_keys, (head_dim, width))
    program.latent(
        f"{label}.rotate",
        query,
        row,
        absorbed,
        heads,
        stride=head_dim,
        rope=None if rope is None else rope.index,
        rotated=0 if rope is None else rope.rotated,
    )
    program.attend(
        f"{label}.attend",
        absorbed,
        attended,
        heads,
        scale=mixer.scale,
        window=None,
        softcap=None,
        sinks=None,
    )
    strides = rank, expansion.value_dim
    program.heads(f"{label}.expand", attended, values, expansion.packed_values, strides)
    _project(emitter, f"{label}.o_proj", mixer.o_proj, values, output)
