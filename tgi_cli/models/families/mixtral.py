"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from collections.abc import Callable

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoESpec, NormSpec
from tgi_cli.models.weight_map import (
    NUMBERED,
    PRE_NORMS,
    Names,
    Source,
    StackedExperts,
    expert_names,
    gated_parts,
    has_stacked_experts,
)

NAMES = Names(
    modules={
        **PRE_NORMS,
        "mlp.router": "block_sparse_moe.gate",
        **gated_parts("mlp.experts.*", "block_sparse_moe.experts.*", NUMBERED),
    }
)

RENAMED = Names(modules={**PRE_NORMS, "mlp.router": "mlp.gate"})
"""transformers 5's own, which gptqmodel 7 writes, too: ``mlp.experts.*.gate_proj``."""

STACKED = StackedExperts(RENAMED)


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/mixtral"""
    num_heads, num_kv_heads, head_dim = config_fields.heads(config, 8)
    context = config.positive("max_position_embeddings", 4096 * 32)
    num_layers = config.positive("num_hidden_layers")
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-5))
    experts = MoESpec(
        num_experts=config.positive("num_local_experts", 8),
        top_k=config.positive("num_experts_per_tok", 2),
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=AttentionSpec(
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    window=window,
                ),
                mlp=experts,
                input_norm=norm,
                mlp_norm=norm,
            )
            for window in config_fields.windows(config, num_layers, context)
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context, 1e6),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=_source(config),
    )


def _source(config: ModelConfig) -> Callable[[str], Source]:
    if has_stacked_experts(config.path):
        return STACKED
    return RENAMED if any(".mlp.experts." in name for name in expert_names(config.path)) else NAMES
