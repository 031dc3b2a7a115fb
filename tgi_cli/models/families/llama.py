"""Llama (https://arxiv.org/abs/2302.13971) and what shares its shape: Mistral, Yi, SmolLM."""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names

NAMES = Names(modules=PRE_NORMS)

_WINDOWED = ("mistral", "ministral")
"""Model types with sliding windows, and without biases."""

_WINDOWED_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""Where transformers' classes for them differ from LlamaConfig in what an absent key means."""


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/llama and .../mistral"""
    windowed = config.get("model_type", str, "") in _WINDOWED
    defaults = _WINDOWED_DEFAULTS if windowed else {}
    num_heads, num_kv_heads, head_dim = config_fields.heads(
        config, defaults.get("num_key_value_heads")
    )
    context = config.positive(
        "max_position_embeddings", defaults.get("max_position_embeddings", 2048)
    )
    num_layers = config.positive("num_hidden_layers")
    windows: tuple[int | None, ...] = (None,) * num_layers
    if windowed:
        windows = config_fields.windows(config, num_layers, context, defaults["sliding_window"])
    bias = not windowed and config.get("attention_bias", bool, False)
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-6))
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
        bias=not windowed and config.get("mlp_bias", bool, False),
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=AttentionSpec(
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    bias=bias,
                    output_bias=bias,
                    window=window,
                ),
                mlp=mlp,
                input_norm=norm,
                mlp_norm=norm,
            )
            for window in windows
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=NAMES,
    )
