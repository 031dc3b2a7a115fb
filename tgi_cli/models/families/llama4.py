"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/): of all models the text part.

Three of four layers rotate positions and see a chunk of them, the fourth sees all and lets its
queries grow with their position instead. Experts are given their input times the router's sigmoid.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig, TextModelPart
from tgi_cli.models.spec import DecoderSpec, LayerSpec, MoESpec, NormSpec, TemperatureSpec
from tgi_cli.models.weight_map import (
    PRE_NORMS,
    ModuleSource,
    Names,
    Source,
    StackedExperts,
    decoder_names,
    paired_halves,
)

CHUNKED, FULL = "chunked_attention", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "num_experts_per_tok": 1, "num_local_experts": 16,
    "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192,
    "attn_scale": 0.1,
}  # fmt: skip


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/llama4"""
    part = TextModelPart.of(config, "Llama4ForCausalLM")
    config = config_fields.filled(part.config, _DEFAULTS)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float))
    dense = config_fields.gated_mlp(config, "intermediate_size_mlp")
    experts = MoESpec(
        num_experts=config.positive("num_local_experts"),
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=config.positive("intermediate_size"),
        activation=dense.activation,
        router="sigmoid_topk",
        normalize=False,
        shared_intermediate_size=config.positive("intermediate_size"),
        scale_inputs=True,
    )
    temperature = None
    if config.raw.get("attn_temperature_tuning"):
        scale, period = (config.get(key, float) for key in ("attn_scale", "floor_scale"))
        temperature = TemperatureSpec(scale=scale, period=period)
    behind = None if temperature is None else 1
    still = config_fields.attention(config, qk_norm="unit", rope=behind)
    eps = norm.eps if config.get("use_qk_norm", bool) else None
    turning = replace(still, rope=0, qk_norm_eps=eps)
    chunk = None
    if config.raw.get("attention_chunk_size") is not None:
        chunk = config.positive("attention_chunk_size")
    rope = config_fields.rope(config, still.head_dim, context, 500000.0)
    halves = paired_halves(0, still.head_dim, still.head_dim)
    modules: dict[str, str | ModuleSource] = {
        **PRE_NORMS,
        **{f"self_attn.{x}_proj": ModuleSource(f"self_attn.{x}_proj", halves) for x in "qk"},
    }
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=replace(turning if turns else still, chunk=chunk if chunked else None),
                mlp=experts if sparse else dense,
                input_norm=norm,
                mlp_norm=norm,
            )
            for turns, chunked, sparse in _layers(config)
        ),
        final_norm=norm,
        ropes=(rope,) if temperature is None else (rope, temperature),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=partial(_source, decoder_names(part.prefix, modules), not config.is_gguf),
        ignored=(r"(vision_model|multi_modal_projector)\..*",) if part.notice else (),
        notice=part.notice,
    )


def _layers(config: ModelConfig) -> list[tuple[bool, bool, bool]]:
    """Whether each layer rotates positions, sees a chunk, and has experts."""
    turning = config_fields.rotated_layers(config)
    default = [CHUNKED if turns else FULL for turns in turning]
    kinds = config_fields.layer_kinds(config, default, (CHUNKED, FULL))
    step = config.positive("interleave_moe_layer_step")
    sparse = config.get("moe_layers", list, list(range(step - 1, len(kinds), step)))
    return [(turning[n], kind == CHUNKED, n in sparse) for n, kind in enumerate(kinds)]


def _source(names: Names, are_stacked: bool, name: str) -> Source:
    """Experts are stacked and stored the other way around, but in GGUF files."""
    if ".experts." in name and are_stacked:
        experts = "feed_forward.experts"
        stacked = StackedExperts(names, f"{experts}.gate_up_proj", f"{experts}.down_proj")
        return replace(stacked(name.replace("model.layers", names.layers, 1)), transposed=True)
    return names(name.replace(".mlp.", ".feed_forward."))
