"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4): of all its models the text part.

Heads are larger where there is no window. The small models have an embedding of each token for
every layer, and their last layers read the caches of the last ones of their kind before them; the
sparse model has experts beside an MLP.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import config_fields
from tgi_cli.models.config import TEXT_ALONE, ModelConfig, text_part
from tgi_cli.models.families import gemma4_names
from tgi_cli.models.families.gemma4_names import FULL, SLIDING
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    MLPAndExpertsSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gemma4"""
    seeing = config.architecture != "Gemma4ForCausalLM"
    config = text_part(config, tied=True) if seeing else config
    config = config_fields.filled(config, gemma4_names.DEFAULTS)
    if config.raw.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(f"{config.architecture} is not supported without causality")
    context, num_layers = (
        config.positive(key) for key in ("max_position_embeddings", "num_hidden_layers")
    )
    default = [SLIDING if (layer + 1) % 6 else FULL for layer in range(num_layers)]
    kinds = [*config_fields.layer_kinds(config, default)[:-1], FULL]
    attentions = [_attention(config, kinds, layer, context) for layer in range(num_layers)]
    norm = NormSpec(config.get("rms_norm_eps", float))
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=gemma4_names.activation(config),
    )
    wider = 2 if config.get("use_double_wide_mlp", bool, False) else 1
    shared = replace(mlp, intermediate_size=wider * mlp.intermediate_size)
    experts = _experts(config, mlp, norm) if config.raw.get("enable_moe_block") else None
    layer = replace(
        gemma4_names.layer(config, norm),
        mlp_norm=None if experts else norm,
        output_scalar=True,
    )
    dims = {kind: a.head_dim for kind, a in zip(kinds, attentions, strict=True)}
    parameters = gemma4_names.ROPES | config.get("rope_parameters", dict, {})
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            replace(layer, mixer=each, mlp=experts or (mlp if each.cache is None else shared))
            for each in attentions
        ),
        final_norm=norm,
        ropes=tuple(
            config_fields.rope_spec(config, dims.get(kind, 2), context, parameters[kind])
            for kind in (FULL, SLIDING)
        ),
        tie_word_embeddings=config.get("tie_word_embeddings", bool),
        embedding_scale=config.positive("hidden_size") ** 0.5,
        logit_softcap=config_fields.factor(config, "final_logit_softcapping"),
        source=partial(
            gemma4_names.source,
            gemma4_names.SEEING if seeing else gemma4_names.ALONE,
            config.positive("hidden_size"),
        ),
        ignored=gemma4_names.ignored(attentions),
        notice=TEXT_ALONE if seeing else "",
    )


def _attention(config: ModelConfig, kinds: list[str], layer: int, context: int) -> AttentionSpec:
    full = kinds[layer] == FULL
    keys_are_values = full and config.get("attention_k_eq_v", bool, False)
    num_kv_heads, head_dim = config.positive("num_key_value_heads"), config.positive("head_dim")
    if full:
        head_dim = config.positive("global_head_dim")
    if keys_are_values and config.raw.get("num_global_key_value_heads") is not None:
        num_kv_heads = config.positive("num_global_key_value_heads")
    by_layer = config.get("per_layer_config", dict, {})
    # transformers pads the numbers with zeros to a common width.
    own: dict[str, Any] = next((by_layer[key] for key in by_layer if int(key) == layer), {})
    bias = config.get("attention_bias", bool, False)
    return AttentionSpec(
        num_heads=config.positive("num_attention_heads"),
        num_kv_heads=int(own.get("num_key_value_heads", num_kv_heads)),
        head_dim=int(own.get("head_dim", head_dim)),
        rope=0 if full else 1,
        bias=bias,
        output_bias=bias,
        scale=1.0,
        window=config_fields.windows(config, len(kinds), context, kinds=kinds)[layer],
        qk_norm_eps=config.get("rms_norm_eps", float),
        value_norm=True,
        values_from_keys=keys_are_values,
        cache=gemma4_names.shared_cache(config, kinds, layer),
    )


def _experts(config: ModelConfig, mlp: MLPSpec, norm: NormSpec) -> MLPAndExpertsSpec:
    experts = MoESpec(
        num_experts=config.positive("num_experts"),
        top_k=config.positive("top_k_experts"),
        intermediate_size=config.positive("moe_intermediate_size"),
        activation=mlp.activation,
        router_float32=True,
        expert_scales=True,
    )
    return MLPAndExpertsSpec(dense=mlp, experts=experts, eps=norm.eps)
