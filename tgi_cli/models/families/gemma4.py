"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4): of all its models the text part.

Heads are larger where there is no window. The small models have an embedding of each token for
every layer, and their last layers read the caches of the last ones of their kind before them; the
sparse model has experts beside an MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import config_fields, gemma_fields
from tgi_cli.models.config import ModelConfig, TextModelPart
from tgi_cli.models.families.gemma4_names import Gemma4Names
from tgi_cli.models.gemma_fields import FULL, SLIDING
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    MLPAndExpertsSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}  # fmt: skip
_ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gemma4"""
    part = TextModelPart.of(config, "Gemma4ForCausalLM", tied=True)
    config = config_fields.filled(part.config, _DEFAULTS)
    part = replace(part, config=config)
    if config.raw.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(f"{config.architecture} is not supported without causality")
    context, hidden_size = (config.positive(k) for k in ("max_position_embeddings", "hidden_size"))
    kinds = [*gemma_fields.layer_kinds(config, full_every=6)[:-1], FULL]
    attentions = [_attention(config, kinds, layer, context) for layer in range(len(kinds))]
    norm = NormSpec(config.get("rms_norm_eps", float))
    size, activation = config.positive("intermediate_size"), gemma_fields.activation(config)
    mlp = MLPSpec(intermediate_size=size, activation=activation)
    wider = 2 if config.get("use_double_wide_mlp", bool, False) else 1
    shared = replace(mlp, intermediate_size=wider * size)
    experts = _experts(config, mlp, norm) if config.raw.get("enable_moe_block") else None
    layer = replace(gemma_fields.layer(config, norm), output_scalar=True)
    if experts is not None:
        layer = replace(layer, mlp_norm=None)
    dims = {kind: a.head_dim for kind, a in zip(kinds, attentions, strict=True)}
    parameters = _ROPES | config.get("rope_parameters", dict, {})
    return gemma_fields.decoder(
        part,
        [
            replace(layer, mixer=each, mlp=experts or (mlp if each.cache is None else shared))
            for each in attentions
        ],
        ropes=tuple(
            config_fields.rope_spec(config, dims.get(kind, 2), context, parameters[kind])
            for kind in _ROPES
        ),
        source=Gemma4Names(part.prefix, hidden_size, stacked=not config.is_gguf),
    )


def _attention(config: ModelConfig, kinds: list[str], layer: int, context: int) -> AttentionSpec:
    full = kinds[layer] == FULL
    # transformers lets the tokens of an image attend to each other where there is a window.
    bidirectional = config.raw.get("use_bidirectional_attention") == "vision"
    keys_are_values = full and config.get("attention_k_eq_v", bool, False)
    by_layer = config.get("per_layer_config", dict, {})
    # transformers pads the numbers with zeros to a common width.
    own: dict[str, Any] = next((by_layer[key] for key in by_layer if int(key) == layer), {})
    sizes = {"num_key_value_heads": config.positive("num_key_value_heads")}
    sizes["head_dim"] = config.positive("global_head_dim" if full else "head_dim")
    if keys_are_values and config.raw.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = config.positive("num_global_key_value_heads")
    return config_fields.attention(
        replace(config, raw=config.raw | sizes | own),
        rope=0 if full else 1,
        scale=1.0,
        window=config_fields.windows(config, len(kinds), context, kinds=kinds)[layer],
        qk_norm_eps=config.get("rms_norm_eps", float),
        value_norm=True,
        values_from_keys=keys_are_values,
        spans="window" if bidirectional and not full else "none",
        cache=gemma_fields.shared_cache(config, kinds, layer),
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
