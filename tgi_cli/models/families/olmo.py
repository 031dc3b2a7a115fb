"""OLMo 2 (https://arxiv.org/abs/2501.00656) and OLMo 3 (https://arxiv.org/abs/2512.13961).

Norms come after the blocks and not before them; queries and keys have norms over all heads at
once. OLMo 3 has three layers with a window to one without, and scales the angles of the latter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from tgi_cli.models.weight_map import Names

NAMES = Names(
    modules={
        "mixer_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}

_THIRD_THETA = 500000.0


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/olmo2 and .../olmo3"""
    third = config.architecture == "Olmo3ForCausalLM"
    config = config_fields.filled(config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings")
    num_layers = config.positive("num_hidden_layers")
    norm = NormSpec(config.get("rms_norm_eps", float))
    bias = config.get("attention_bias", bool, False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bias,
        output_bias=bias,
        qk_norm_eps=norm.eps,
        qk_norm="wide",
    )
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
    )
    attentions = (attention,) * num_layers
    if not third:
        ropes: tuple[RopeSpec, ...] = (config_fields.rope(config, head_dim, context),)
    else:
        thetas = {
            "full_attention": config.get("rope_theta", float, _THIRD_THETA),
            "sliding_attention": _THIRD_THETA,
        }
        ropes = config_fields.ropes_by_kind(config, head_dim, context, thetas)
        turns = (["sliding_attention"] * 3 + ["full_attention"]) * num_layers
        kinds = config_fields.layer_kinds(config, turns[:num_layers])
        windows = config_fields.windows(config, num_layers, context, kinds=kinds)
        attentions = tuple(
            replace(attention, rope=list(thetas).index(kind), window=window)
            for kind, window in zip(kinds, windows, strict=True)
        )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(mixer=each, mlp=mlp, mixer_output_norm=norm, mlp_output_norm=norm)
            for each in attentions
        ),
        final_norm=norm,
        ropes=ropes,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=NAMES,
    )
