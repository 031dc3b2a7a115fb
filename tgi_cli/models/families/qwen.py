"""Qwen 2 and 2.5 (https://arxiv.org/abs/2407.10671), Qwen 3 (https://arxiv.org/abs/2505.09388).

Llama's shape. Queries, keys and values of Qwen 2 have biases, queries and keys of Qwen 3 norms.
Either may have windows in its upper layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names

NAMES = Names(modules=PRE_NORMS)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_THIRD_DEFAULTS: dict[str, Any] = _DEFAULTS | {"head_dim": 128}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/qwen2 and .../qwen3"""
    third = config.architecture.startswith("Qwen3")
    config = config_fields.filled(config, _THIRD_DEFAULTS if third else _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-6))
    bias = config.get("attention_bias", bool, False) if third else True
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bias,
        output_bias=bias and third,
        qk_norm_eps=norm.eps if third else None,
    )
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=replace(attention, window=window),
                mlp=mlp,
                input_norm=norm,
                mlp_norm=norm,
            )
            for window in _windows(config, context)
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=NAMES,
    )


def _windows(config: ModelConfig, context: int) -> tuple[int | None, ...]:
    """Only if switched on: from layer ``max_window_layers`` upwards, or by ``layer_types``."""
    num_layers = config.positive("num_hidden_layers")
    if not config.get("use_sliding_window", bool, False):
        config = replace(config, raw=config.raw | {"sliding_window": None})
    first = config.get("max_window_layers", int)
    kinds = [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return config_fields.windows(config, num_layers, context, kinds=kinds)
