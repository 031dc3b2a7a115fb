"""Gemma 3n (https://ai.google.dev/gemma/docs/gemma-3n): of all its models the text part.

Each layer computes one of several streams and has an embedding of each token; a low-rank branch
stands beside attention. The gates of the first MLPs are sparse, and the last layers read the caches
of the last ones of their kind before them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields, gemma_fields
from tgi_cli.models.config import ModelConfig, TextModelPart
from tgi_cli.models.families.gemma import SANDWICH
from tgi_cli.models.gemma_fields import FULL, SLIDING
from tgi_cli.models.spec import AltUpSpec, DecoderSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import decoder_names

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
_MODULES = SANDWICH | gemma_fields.PER_LAYER | _ALTUP


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gemma3n"""
    part = TextModelPart.of(config, "Gemma3nForCausalLM", tied=True)
    config = config_fields.filled(part.config, _DEFAULTS)
    part = replace(part, config=config)
    context = config.positive("max_position_embeddings")
    kinds = gemma_fields.layer_kinds(config, full_every=5)
    windows = config_fields.windows(config, len(kinds), context, kinds=kinds)
    norm = NormSpec(config.get("rms_norm_eps", float))
    attention = config_fields.attention(config, scale=1.0, qk_norm_eps=norm.eps, value_norm=True)
    streams = config.positive("altup_num_inputs")
    layer = replace(
        gemma_fields.layer(config, norm),
        altup=AltUpSpec(
            num_streams=streams,
            active=config.get("altup_active_idx", int),
            eps=norm.eps,
            laurel_rank=config.positive("laurel_rank"),
            scale_active=config.get("altup_correct_scale", bool),
        ),
    )
    top = gemma_fields.TOP | {
        f"streams.{ours}.{n}": f"{theirs}.{n}"
        for ours, theirs in (("split", "altup_projections"), ("merge", "altup_unembed_projections"))
        for n in range(streams - 1)
    }
    thetas = {
        FULL: config.get("rope_theta", float, 1e6),
        SLIDING: config.get("rope_local_base_freq", float, 1e4),
    }
    return gemma_fields.decoder(
        part,
        [
            replace(
                layer,
                mixer=replace(
                    attention,
                    rope=list(thetas).index(kind),
                    window=window,
                    cache=gemma_fields.shared_cache(config, kinds, index),
                ),
                mlp=mlp,
            )
            for index, (kind, window, mlp) in enumerate(
                zip(kinds, windows, _mlps(config, len(kinds)), strict=True)
            )
        ],
        ropes=config_fields.ropes_by_kind(config, attention.head_dim, context, thetas),
        source=decoder_names(part.prefix, _MODULES, top),
    )


def _mlps(config: ModelConfig, num_layers: int) -> list[MLPSpec]:
    """The MLP of each layer. By default, the gates of the first ten layers are sparse."""
    sparse = [0.95] * 10 if num_layers > 10 else []
    default = sparse + [0.0] * (num_layers - len(sparse))
    shares = config_fields.per_layer(config, "activation_sparsity_pattern", num_layers, default)
    sizes = config_fields.per_layer(config, "intermediate_size", num_layers, None)
    activation = gemma_fields.activation(config)
    return [
        MLPSpec(intermediate_size=int(size), activation=activation, sparsity=share)
        for size, share in zip(sizes, shares, strict=True)
    ]
