"""Seed-OSS (https://huggingface.co/ByteDance-Seed): Llama with biases here and there."""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names

NAMES = Names(modules=PRE_NORMS)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "attention_bias": True,
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/seed_oss"""
    config = config_fields.filled(config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float))
    layer = LayerSpec(
        mixer=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=config.get("attention_bias", bool, False),
            output_bias=config.get("attention_out_bias", bool, False),
        ),
        mlp=MLPSpec(
            intermediate_size=config.positive("intermediate_size"),
            activation=config_fields.activation(config),
            bias=config.get("mlp_bias", bool, False),
        ),
        input_norm=norm,
        mlp_norm=norm,
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=(layer,) * config.positive("num_hidden_layers"),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=NAMES,
    )
