"""LFM 3 (https://huggingface.co/LiquidAI): LFM 2 with windows, head gates and output norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.families.lfm2 import MODULES, TOP
from tgi_cli.models.spec import DecoderSpec, LayerSpec, Mixer, MLPSpec, NormSpec
from tgi_cli.models.state_fields import short_conv, short_conv_modules
from tgi_cli.models.weight_map import Names

_MODULES = MODULES | {
    "mixer_output_norm": "post_operator_norm",
    "mlp_output_norm": "post_ffn_norm",
    "self_attn.head_gate": "self_attn.gate_proj",
}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
    },
}
_KINDS = ("full_attention", "sliding_attention", "conv")


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/lfm3"""
    config = config_fields.filled(config, _DEFAULTS)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("norm_eps", float, 1e-5))
    output_norm = norm if config.get("use_sandwich_norm", bool, True) else None
    full = config_fields.attention(
        config,
        4,
        qk_norm_eps=norm.eps,
        head_gate=config.get("use_attention_gate", bool, True),
    )
    window = config_fields.window(config, context, 256)
    mixers: dict[str, Mixer] = {
        "full_attention": full,
        "sliding_attention": replace(full, rope=1, window=window),
        "conv": short_conv(config, 7),
    }
    kinds = [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i and i % 4 == 0 else "conv"
        for i in range(config.positive("num_hidden_layers"))
    ]
    layer = LayerSpec(
        mixer=None,
        mlp=MLPSpec(intermediate_size=config.positive("intermediate_size")),
        input_norm=norm,
        mixer_output_norm=output_norm,
        mlp_norm=norm,
        mlp_output_norm=output_norm,
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            replace(layer, mixer=mixers[kind])
            for kind in config_fields.layer_kinds(config, kinds, _KINDS)
        ),
        final_norm=norm,
        ropes=config_fields.ropes_by_kind(
            config, full.head_dim, context, {"full_attention": 1e6, "sliding_attention": 1e6}
        ),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        source=Names(modules={**_MODULES, **short_conv_modules(config)}, top=TOP),
    )
