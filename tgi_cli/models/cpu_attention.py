"""Emits attention as operations of a program."""

from __future__ import annotations

from tgi_cli.kernels.program_parts import BufferView, HeadLayout, HeadNorms, Rope, ScoreRule
from tgi_cli.kernels.recurrence import GateLayer
from tgi_cli.layers import Attention
from tgi_cli.layers.latent import LatentAttention
from tgi_cli.models.cpu_emitter import Emitter, Output, UnsupportedLayer


def emit_attention(
    emitter: Emitter,
    label: str,
    attention: Attention,
    rope: Rope | None,
    source: BufferView,
    output: Output,
) -> None:
    """Multi-head, grouped-query or multi-query attention.

    Raises:
        UnsupportedLayer: there are no operations for it.
    """
    program, spec = emitter.program, emitter.kv_specs[attention.layer]
    num_heads, dims, value_dim = attention.heads[0], attention.head_dim, attention.value_dim
    heads = HeadLayout(attention.layer, num_heads, spec.num_kv_heads, dims, value_dim)
    sizes = [num_heads * dims, spec.num_kv_heads * dims, spec.num_kv_heads * value_dim]
    qkv = emitter.buffer("qkv", sum(attention.widths))
    attended = emitter.buffer("attended", num_heads * value_dim)
    emitter.linear(f"{label}.qkv_proj", attention.qkv_proj, source, qkv)
    values: BufferView | None = qkv.at(sum(sizes[:2]))
    if attention.shared:
        values = None
    elif attention.values_from_keys:
        values = emitter.buffer("values", sizes[2])
    if attention.q_norm is not None and attention.k_norm is not None and not attention.shared:
        keys = qkv.at(sizes[0])
        emitter.norm(f"{label}.q_norm", attention.q_norm, qkv, qkv)
        emitter.norm(f"{label}.k_norm", attention.k_norm, keys, keys)
    program.rotate(
        f"{label}.rotate",
        heads,
        qkv,
        values,
        rope=rope,
        norms=_head_norms(label, attention),
        values_from_keys=attention.values_from_keys,
    )
    rule = ScoreRule(
        scale=attention.scale,
        window=spec.window,
        chunk=spec.chunk,
        spans=spec.spans,
        softcap=attention.softcap,
        sinks=None if attention.sinks is None else attention.sinks.weight.float(),
        bias=None if attention.slopes is None else attention.slopes.weight.float(),
    )
    program.attend(f"{label}.attend", qkv, attended, heads, rule)
    if attention.output_gate:
        gate, sigmoid = qkv.at(sum(attention.widths[:-1])), GateLayer("sigmoid")
        program.gate(f"{label}.gate", attended, gate, attended, sigmoid, num_heads, value_dim)
    if attention.head_gate is not None:
        gate, sigmoid = emitter.buffer("gates", num_heads), GateLayer("sigmoid", per_group=True)
        emitter.linear(f"{label}.gate_proj", attention.head_gate, source, gate)
        program.gate(f"{label}.gate", attended, gate, attended, sigmoid, num_heads, value_dim)
    emitter.project(f"{label}.o_proj", attention.o_proj, attended, output)


def _head_norms(label: str, attention: Attention) -> HeadNorms:
    heads, values = attention.qk_norm, attention.v_norm
    if heads is not None and values is not None and heads.eps != values.eps:
        raise UnsupportedLayer(f"{label}: norms of queries and values that differ")
    first = heads or values
    return HeadNorms(
        weight=None if heads is None else heads.weight.float(),
        value_weight=None if values is None else values.weight.float(),
        eps=0.0 if first is None else first.eps,
    )


def emit_latent(
    emitter: Emitter,
    label: str,
    mixer: LatentAttention,
    rope: Rope | None,
    source: BufferView,
    output: Output,
) -> None:
    """Multi-head latent attention.

    Raises:
        UnsupportedLayer: there are no operations for it.
    """
    expansion, program = mixer.kv_b_proj, emitter.program
    if expansion.packed_keys is None or expansion.packed_values is None:
        raise UnsupportedLayer(f"{label}: its weights are not packed for the kernels")
    if mixer.indexer is not None:
        raise UnsupportedLayer(f"{label}: attention to chosen tokens")
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
    program.latent(f"{label}.rotate", query, row, absorbed, heads, stride=head_dim, rope=rope)
    rule = ScoreRule(scale=mixer.scale)
    program.attend(f"{label}.attend", absorbed, attended, heads, rule)
    strides = rank, expansion.value_dim
    program.heads(f"{label}.expand", attended, values, expansion.packed_values, strides)
    emitter.project(f"{label}.o_proj", mixer.o_proj, values, output)
