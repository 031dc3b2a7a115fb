"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/): of all models the text part.

Three of four layers rotate positions and see a chunk of them, the fourth sees all and lets its
queries grow with their position instead. Experts are given their input times the router's sigmoid.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import TEXT_ALONE, ModelConfig, text_part
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
    TemperatureSpec,
)
from tgi_cli.models.weight_map import ModuleSource, Names, Source, StackedExperts, paired_halves

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
    seeing = config.architecture != "Llama4ForCausalLM"
    config = config_fields.filled(text_part(config) if seeing else config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context, num_layers = (
        config.positive(key) for key in ("max_position_embeddings", "num_hidden_layers")
    )
    norm, bias = (
        NormSpec(config.get("rms_norm_eps", float)),
        config.get("attention_bias", bool, False),
    )
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bias,
        output_bias=bias,
        qk_norm="unit",
    )
    activation = config_fields.activation(config)
    dense = MLPSpec(
        intermediate_size=config.positive("intermediate_size_mlp"), activation=activation
    )
    experts = MoESpec(
        num_experts=config.positive("num_local_experts"),
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=config.positive("intermediate_size"),
        activation=activation,
        router="sigmoid_topk",
        normalize=False,
        shared_intermediate_size=config.positive("intermediate_size"),
        scale_inputs=True,
    )
    step, interval = (
        config.positive(key) for key in ("interleave_moe_layer_step", "no_rope_layer_interval")
    )
    sparse = config.get("moe_layers", list, list(range(step - 1, num_layers, step)))
    turned = config.raw.get("no_rope_layers") or [
        (layer + 1) % interval != 0 for layer in range(num_layers)
    ]
    kinds = config_fields.layer_kinds(
        config, [CHUNKED if turned[n] else FULL for n in range(num_layers)], (CHUNKED, FULL)
    )
    ropes: list[RopeSpec | TemperatureSpec] = [
        config_fields.rope(config, head_dim, context, 500000.0)
    ]
    temperature = None
    if config.raw.get("attn_temperature_tuning"):
        temperature = len(ropes)
        scale, period = (config.get(key, float) for key in ("attn_scale", "floor_scale"))
        ropes.append(TemperatureSpec(scale=scale, period=period))
    chunk = None
    if config.raw.get("attention_chunk_size") is not None:
        chunk = config.positive("attention_chunk_size")
    eps = norm.eps if config.get("use_qk_norm", bool) else None
    decoder = "model.language_model" if seeing else "model"
    halves = paired_halves(0, head_dim, head_dim)
    names = Names(
        layers=f"{decoder}.layers",
        modules={
            "input_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "self_attn.q_proj": ModuleSource("self_attn.q_proj", halves),
            "self_attn.k_proj": ModuleSource("self_attn.k_proj", halves),
        },
        top={f"model.{name}": f"{decoder}.{name}" for name in ("embed_tokens", "norm")},
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=replace(
                    attention,
                    rope=0 if turns else temperature,
                    chunk=chunk if kind == CHUNKED else None,
                    qk_norm_eps=eps if turns else None,
                ),
                mlp=experts if layer in sparse else dense,
                input_norm=norm,
                mlp_norm=norm,
            )
            for layer, (kind, turns) in enumerate(zip(kinds, turned, strict=False))
        ),
        final_norm=norm,
        ropes=tuple(ropes),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=partial(_source, names),
        ignored=(r"(vision_model|multi_modal_projector)\..*",) if seeing else (),
        notice=TEXT_ALONE if seeing else "",
    )


def _source(names: Names, name: str) -> Source:
    """Experts are stacked and stored the other way around."""
    if ".experts." in name:
        experts = "feed_forward.experts"
        stacked = StackedExperts(names, f"{experts}.gate_up_proj", f"{experts}.down_proj")
        return replace(stacked(name.replace("model.layers", names.layers, 1)), transposed=True)
    return names(name.replace(".mlp.", ".feed_forward."))
