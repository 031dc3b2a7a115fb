"""SmolLM 3 (https://huggingface.co/blog/smollm3): Llama with some layers without rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names

NAMES = Names(modules=PRE_NORMS)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/smollm3"""
    config = config_fields.filled(config, _DEFAULTS)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float))
    attention = config_fields.attention(config)
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
        bias=config.get("mlp_bias", bool, False),
    )
    rotated = config_fields.rotated_layers(config)
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=replace(attention, rope=0 if rotates else None, window=window),
                mlp=mlp,
                input_norm=norm,
                mlp_norm=norm,
            )
            for rotates, window in zip(rotated, _windows(config, context, rotated), strict=True)
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, attention.head_dim, context, 2e6),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=NAMES,
    )


def _windows(config: ModelConfig, context: int, rotated: list[bool]) -> tuple[int | None, ...]:
    """Only if switched on, and then in layers without rotation, unless ``layer_types`` differs."""
    if not config.get("use_sliding_window", bool, False):
        config = replace(config, raw=config.raw | {"sliding_window": None})
    kinds = ["full_attention" if rotates else "sliding_attention" for rotates in rotated]
    return config_fields.windows(config, len(rotated), context, kinds=kinds)
