"""Gemma 3n (https://ai.google.dev/gemma/docs/gemma-3n): of all its models the text part.

Each layer computes one of several streams and has an embedding of each token; a low-rank branch
stands beside attention. The gates of the first MLPs are sparse, and the last layers read the caches
of the last ones of their kind before them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import TEXT_ALONE, ModelConfig, text_part
from tgi_cli.models.families import gemma4_names
from tgi_cli.models.families.gemma import SANDWICH
from tgi_cli.models.families.gemma4_names import FULL, SLIDING
from tgi_cli.models.spec import (
    AltUpSpec,
    AttentionSpec,
    DecoderSpec,
    MLPSpec,
    NormSpec,
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384,
    "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "sliding_window": 512, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256, "altup_active_idx": 0, "altup_correct_scale": True,
    "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
}  # fmt: skip
_ALTUP = {
    "altup.output_scale": "altup.correct_output_scale",
    "altup.laurel_left": "laurel.linear_left",
    "altup.laurel_right": "laurel.linear_right",
    "altup.laurel_norm": "laurel.post_laurel_norm",
}
_MODULES = SANDWICH | gemma4_names.PER_LAYER | _ALTUP


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gemma3n"""
    seeing = config.architecture != "Gemma3nForCausalLM"
    config = config_fields.filled(text_part(config, tied=True) if seeing else config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context, num_layers = (
        config.positive(key) for key in ("max_position_embeddings", "num_hidden_layers")
    )
    default = [SLIDING if (layer + 1) % 5 else FULL for layer in range(num_layers)]
    kinds = config_fields.layer_kinds(config, default)
    windows = config_fields.windows(config, num_layers, context, kinds=kinds)
    norm = NormSpec(config.get("rms_norm_eps", float))
    bias = config.get("attention_bias", bool, False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bias,
        output_bias=bias,
        scale=1.0,
        qk_norm_eps=norm.eps,
        value_norm=True,
    )
    attentions = [
        replace(
            attention,
            rope=0 if kind == FULL else 1,
            window=window,
            cache=gemma4_names.shared_cache(config, kinds, layer),
        )
        for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    ]
    activation = gemma4_names.activation(config)
    streams = config.positive("altup_num_inputs")
    layer = replace(
        gemma4_names.layer(config, norm),
        altup=AltUpSpec(
            num_streams=streams,
            active=config.get("altup_active_idx", int) % streams,
            eps=norm.eps,
            laurel_rank=config.positive("laurel_rank"),
            scale_active=config.get("altup_correct_scale", bool),
        ),
    )
    sizes = config_fields.per_layer(config, "intermediate_size", num_layers, None)
    sparse = [0.95] * 10 if num_layers > 10 else []
    shares = config_fields.per_layer(
        config,
        "activation_sparsity_pattern",
        num_layers,
        sparse + [0.0] * (num_layers - len(sparse)),
    )
    top = gemma4_names.TOP | {
        f"streams.{ours}.{n}": f"{theirs}.{n}"
        for ours, theirs in (("split", "altup_projections"), ("merge", "altup_unembed_projections"))
        for n in range(streams - 1)
    }
    decoder = "model.language_model" if seeing else "model"
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            replace(
                layer,
                mixer=each,
                mlp=MLPSpec(intermediate_size=int(size), activation=activation, sparsity=share),
            )
            for each, size, share in zip(attentions, sizes, shares, strict=True)
        ),
        final_norm=norm,
        ropes=config_fields.ropes_by_kind(
            config,
            head_dim,
            context,
            {
                FULL: config.get("rope_theta", float, 1e6),
                SLIDING: config.get("rope_local_base_freq", float, 1e4),
            },
        ),
        tie_word_embeddings=config.get("tie_word_embeddings", bool),
        embedding_scale=config.positive("hidden_size") ** 0.5,
        logit_softcap=config_fields.factor(config, "final_logit_softcapping"),
        source=gemma4_names.names(decoder, _MODULES, top),
        ignored=gemma4_names.ignored(attentions),
        notice=TEXT_ALONE if seeing else "",
    )
