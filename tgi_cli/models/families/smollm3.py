"""SmolLM 3 (https://huggingface.co/blog/smollm3): Llama with some layers without rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import Names

NAMES = Names(modules={"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/smollm3"""
    config = config_fields.filled(config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float))
    bias = config.get("attention_bias", bool, False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bias,
        output_bias=bias,
    )
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
        bias=config.get("mlp_bias", bool, False),
    )
    rotated = _rotated(config)
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
        ropes=(config_fields.rope(config, head_dim, context, 2e6),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=NAMES,
    )


def _rotated(config: ModelConfig) -> list[bool]:
    """Whether a layer rotates: the misnamed list of config.json has 1 for layers that do."""
    num_layers = config.positive("num_hidden_layers")
    interval = config.positive("no_rope_layer_interval")
    default = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    rotated = config.get("no_rope_layers", list, default)[:num_layers]
    if len(rotated) != num_layers:
        raise config.invalid(f"'no_rope_layers' names {len(rotated)} of {num_layers} layers")
    return [bool(each) for each in rotated]


def _windows(config: ModelConfig, context: int, rotated: list[bool]) -> tuple[int | None, ...]:
    """Only if switched on, and then in layers without rotation, unless ``layer_types`` differs."""
    if not config.get("use_sliding_window", bool, False):
        config = replace(config, raw=config.raw | {"sliding_window": None})
    kinds = ["full_attention" if rotates else "sliding_attention" for rotates in rotated]
    return config_fields.windows(config, len(rotated), context, kinds=kinds)
