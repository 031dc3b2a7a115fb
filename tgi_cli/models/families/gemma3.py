"""Gemma 3 (https://arxiv.org/abs/2503.19786): of multimodal models, the text part.

Gemma 2 with norms on queries and keys instead of bounds on scores, five layers with a window to
one without, and rotary angles of their own in either kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig, TextModelPart
from tgi_cli.models.families.gemma import SANDWICH
from tgi_cli.models.spec import DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import decoder_names

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

_OF_IMAGES = (
    r"(model\.)?vision_tower\..*",
    r"(model\.)?multi_modal_projector\..*",
)


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gemma3"""
    part = TextModelPart.of(config, "Gemma3ForCausalLM", tied=True)
    config = part.config
    config_fields.refuse(config, "use_bidirectional_attention", "attn_logit_softcapping")
    config = config_fields.filled(config, _DEFAULTS)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float), one_plus=True)
    attention = config_fields.attention(
        config,
        scale=config_fields.inverse_root(config, "query_pre_attn_scalar"),
        qk_norm_eps=norm.eps,
        qk_norm="one_plus",
        spans="window" if part.notice else "none",
    )
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
    )
    thetas = {
        "full_attention": config.get("rope_theta", float),
        "sliding_attention": config.get("rope_local_base_freq", float),
    }
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=replace(attention, rope=list(thetas).index(kind), window=window),
                mlp=mlp,
                input_norm=norm,
                mixer_output_norm=norm,
                mlp_norm=norm,
                mlp_output_norm=norm,
            )
            for kind, window in _kinds(config, context)
        ),
        final_norm=norm,
        ropes=config_fields.ropes_by_kind(config, attention.head_dim, context, thetas),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        embedding_scale=config.positive("hidden_size") ** 0.5,
        logit_softcap=config_fields.factor(config, "final_logit_softcapping"),
        source=decoder_names(part.prefix, SANDWICH),
        ignored=_OF_IMAGES if part.notice else (),
        notice=part.notice,
    )


def _kinds(config: ModelConfig, context: int) -> list[tuple[str, int | None]]:
    """Kind and window of each layer; where none is named, every sixth sees everything."""
    num_layers = config.positive("num_hidden_layers")
    pattern = config.positive("sliding_window_pattern")
    kinds = config_fields.layer_kinds(
        config,
        [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(num_layers)
        ],
    )
    windows = config_fields.windows(config, num_layers, context, kinds=kinds)
    return list(zip(kinds, windows, strict=True))
