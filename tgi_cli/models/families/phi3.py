"""Phi-3 (https://arxiv.org/abs/2404.14219) and Phi-4 (https://arxiv.org/abs/2412.08905).

Llama's shape. Checkpoints have queries, keys and values in one tensor, gates and ups in another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)
from tgi_cli.models.weight_map import PRE_NORMS, Names, stacked

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/phi3"""
    config = config_fields.filled(config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings")
    intermediate_size = config.positive("intermediate_size")
    norm = NormSpec(config.get("rms_norm_eps", float))
    attention = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    mlp = MLPSpec(intermediate_size=intermediate_size, activation=config_fields.activation(config))
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
            for window in config_fields.windows(
                config, config.positive("num_hidden_layers"), context
            )
        ),
        final_norm=norm,
        ropes=(_rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=_names(num_heads * head_dim, num_kv_heads * head_dim, intermediate_size),
    )


def _rope(config: ModelConfig, head_dim: int, context: int) -> RopeSpec:
    """Checkpoints have called longrope "su", and "yarn" as well."""
    rope = config_fields.rope(config, head_dim, context)
    kind = rope.parameters.get("rope_type") or rope.parameters.get("type") or "default"
    if kind == "default":
        return rope
    if kind not in ("longrope", "su", "yarn"):
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported for {config.architecture}",
            "supported: default, longrope",
        )
    return replace(rope, parameters={**rope.parameters, "rope_type": "longrope"})


def _names(queries: int, keys: int, intermediate_size: int) -> Names:
    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    mlp = {"mlp.gate_proj": intermediate_size, "mlp.up_proj": intermediate_size}
    return Names(
        modules={
            **PRE_NORMS,
            **stacked(attention, "self_attn.qkv_proj"),
            **stacked(mlp, "mlp.gate_up_proj"),
        }
    )
