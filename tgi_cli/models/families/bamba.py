"""Bamba (https://huggingface.co/ibm-ai-platform): Mamba-2 layers, a few with attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.state_fields import granite_mamba, mamba_modules
from tgi_cli.models.weight_map import Names

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 262144,
}  # fmt: skip
_ROTATED = {"partial_rotary_factor": 0.5}
"""Regardless of config.json."""


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/bamba"""
    config = replace(config, raw={**_DEFAULTS, **config.raw, **_ROTATED})
    num_heads, num_kv_heads, head_dim = config_fields.heads(config, 8)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-5))
    bias = config.get("attention_bias", bool, False)
    ssm = granite_mamba(config, norm.eps)
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
    full = config.get("attn_layer_indices", list, [])
    modules = {
        "input_norm": "input_layernorm",
        "mlp_norm": "pre_ff_layernorm",
        **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **mamba_modules(ssm, "mamba"),
    }
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=attention if layer in full else ssm, mlp=mlp, input_norm=norm, mlp_norm=norm
            )
            for layer in range(config.positive("num_hidden_layers"))
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=Names(modules=modules, top={"model.norm": "model.final_layernorm"}),
    )
