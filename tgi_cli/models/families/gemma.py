"""Gemma (https://arxiv.org/abs/2403.08295) and Gemma 2 (https://arxiv.org/abs/2408.00118).

Token vectors are scaled by the root of their width, norms multiply by 1 + weight. Gemma 2 has
norms before and after each block, bounds scores and logits, and a window in every other layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names

NAMES = Names(modules=PRE_NORMS)

SANDWICH = {
    "input_norm": "input_layernorm",
    "mixer_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
"""The norms of a layer, as Gemma 2 and 3 call them."""

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

_SECOND_DEFAULTS: dict[str, Any] = _DEFAULTS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gemma and .../gemma2"""
    config_fields.refuse(config, "use_bidirectional_attention")
    second = config.architecture == "Gemma2ForCausalLM"
    config = config_fields.filled(config, _SECOND_DEFAULTS if second else _DEFAULTS)
    context = config.positive("max_position_embeddings")
    num_layers = config.positive("num_hidden_layers")
    norm = NormSpec(config.get("rms_norm_eps", float), one_plus=True)
    attention = config_fields.attention(
        config,
        scale=config_fields.inverse_root(config, "query_pre_attn_scalar") if second else None,
        softcap=config_fields.factor(config, "attn_logit_softcapping") if second else None,
    )
    key = "hidden_activation" if second else "hidden_act"
    kind = config_fields.activation(config, key, "gelu_pytorch_tanh")
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        # Gemma's first config.json names gelu and means its approximation.
        activation="gelu_pytorch_tanh" if kind == "gelu" and not second else kind,
    )
    windows: tuple[int | None, ...] = (None,) * num_layers
    if second:
        turns = ["sliding_attention", "full_attention"] * num_layers
        windows = config_fields.windows(config, num_layers, context, kinds=turns[:num_layers])
    output_norm = norm if second else None
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=replace(attention, window=window),
                mlp=mlp,
                input_norm=norm,
                mixer_output_norm=output_norm,
                mlp_norm=norm,
                mlp_output_norm=output_norm,
            )
            for window in windows
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, attention.head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        embedding_scale=config.positive("hidden_size") ** 0.5,
        logit_softcap=config_fields.factor(config, "final_logit_softcapping") if second else None,
        source=Names(modules=SANDWICH) if second else NAMES,
    )
