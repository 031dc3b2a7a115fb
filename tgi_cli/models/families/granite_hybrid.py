"""Granite 4 (https://huggingface.co/ibm-granite): Mamba-2 layers, a few with attention.

Granite 3's factors; experts with a shared one, or that one alone. GGUF files of Granite 3 with
experts are read as this without states and without a shared expert.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    Mixer,
    MLPSpec,
    MoESpec,
    NormSpec,
)
from tgi_cli.models.state_fields import granite_mamba, mamba_modules
from tgi_cli.models.weight_map import (
    PRE_NORMS,
    Names,
    StackedExperts,
    gated_parts,
    has_stacked_experts,
    stacked,
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "attention_multiplier": 1.0,
    "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_local_experts": 8,
    "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
}  # fmt: skip


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/granitemoehybrid"""
    config = config_fields.filled(config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float))
    bias = config.get("attention_bias", bool, False)
    rotated = config.get("position_embedding_type", str, "nope") == "rope"
    logits_scaling = config.get("logits_scaling", float)
    if logits_scaling == 0:
        raise config.invalid("'logits_scaling' is 0")
    mixers: dict[str, Mixer] = {
        "full_attention": AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=0 if rotated else None,
            bias=bias,
            output_bias=bias,
            scale=config.get("attention_multiplier", float),
        ),
    }
    kinds = ["linear_attention"] * config.positive("num_hidden_layers")
    kinds = config_fields.layer_kinds(config, kinds, ("linear_attention", "full_attention"))
    mamba: dict[str, Any] = {}
    if "linear_attention" in kinds:
        ssm = granite_mamba(config, norm.eps)
        mixers["linear_attention"], mamba = ssm, mamba_modules(ssm, "mamba")
    activation = config_fields.activation(config)
    has_experts = config.get("num_local_experts", int) != 0
    shared = 0
    if not has_experts or config.get("shared_intermediate_size", int) != 0:
        shared = config.positive("shared_intermediate_size")
    mlp: MLPSpec | MoESpec = MLPSpec(intermediate_size=shared, activation=activation)
    if has_experts:
        mlp = MoESpec(
            num_experts=config.positive("num_local_experts"),
            top_k=config.positive("num_experts_per_tok"),
            intermediate_size=config.positive("intermediate_size"),
            activation=activation,
            router="topk_softmax",
            shared_intermediate_size=shared or None,
        )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=mixers[kind],
                mlp=mlp,
                input_norm=norm,
                mlp_norm=norm,
                residual_scale=config.get("residual_multiplier", float),
            )
            for kind in kinds
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),) if rotated else (),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        embedding_scale=config.get("embedding_multiplier", float),
        logit_scale=1 / logits_scaling,
        source=_source(config, shared, mamba),
    )


def _source(config: ModelConfig, shared: int, mamba: dict[str, Any]) -> Names | StackedExperts:
    """Published names, those of transformers 5 in memory, or GGUF's, with all parts apart."""
    if config.is_gguf:
        apart = {
            **PRE_NORMS,
            "mlp.router": "block_sparse_moe.router.layer",
            **gated_parts("mlp", "shared_mlp"),
            **gated_parts("mlp.shared_expert", "shared_mlp"),
            **gated_parts("mlp.experts.*", "block_sparse_moe.experts.*"),
            **mamba,
        }
        return Names(modules=apart)
    newer = has_stacked_experts(config.path)
    modules: dict[str, Any] = {
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.router": "block_sparse_moe.router" if newer else "block_sparse_moe.router.layer",
        **mamba,
    }
    for mlp in ("mlp", "mlp.shared_expert"):
        halves = {f"{mlp}.gate_proj": shared, f"{mlp}.up_proj": shared}
        modules |= stacked(halves, "shared_mlp.input_linear")
        modules[f"{mlp}.down_proj"] = "shared_mlp.output_linear"
    published = ("input_linear.weight", "output_linear.weight")
    up, down = ("experts.gate_up_proj", "experts.down_proj") if newer else published
    names = Names(modules=modules)
    return StackedExperts(names, f"block_sparse_moe.{up}", f"block_sparse_moe.{down}")
