"""Granite 3 and later dense models (https://huggingface.co/ibm-granite).

Llama's shape, with factors on token vectors, scores, what layers add, and logits.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names

NAMES = Names(modules=PRE_NORMS)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/granite"""
    config = config_fields.filled(config, _DEFAULTS)
    attention = config_fields.attention(config, scale=config.get("attention_multiplier", float))
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float))
    logits_scaling = config.get("logits_scaling", float)
    if logits_scaling == 0:
        raise config.invalid("'logits_scaling' is 0")
    layer = LayerSpec(
        mixer=attention,
        mlp=MLPSpec(
            intermediate_size=config.positive("intermediate_size"),
            activation=config_fields.activation(config),
            bias=config.get("mlp_bias", bool, False),
        ),
        input_norm=norm,
        mlp_norm=norm,
        residual_scale=config.get("residual_multiplier", float),
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=(layer,) * config.positive("num_hidden_layers"),
        final_norm=norm,
        ropes=(config_fields.rope(config, attention.head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        embedding_scale=config.get("embedding_multiplier", float),
        logit_scale=1 / logits_scaling,
        source=NAMES,
    )
