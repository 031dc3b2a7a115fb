"""Readers of config.json for Qwen3-Next and its successors. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import TEXT_ALONE, ModelConfig
from tgi_cli.models.delta_fields import delta_spec, stacked_qkv
from tgi_cli.models.spec import (
    DecoderSpec,
    DeltaSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)
from tgi_cli.models.weight_map import (
    PRE_NORMS,
    ModuleSource,
    StackedExperts,
    decoder_names,
    has_stacked_experts,
    has_tensor,
    interleaved,
)

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
CONDITIONAL_SUFFIX = "ForConditionalGeneration"
"""Suffix of the names of architectures that take images."""

Table = Mapping[str, str | ModuleSource]
"""The checkpoint's modules, by the model's."""


def dense(config: ModelConfig) -> MLPSpec:
    """A layer's feed-forward block."""
    return config_fields.gated_mlp(config)


def experts(config: ModelConfig, num_experts: int, top_k: int) -> MoESpec:
    """A layer's experts; the numbers are defaults."""
    return MoESpec(
        num_experts=config.positive("num_experts", num_experts),
        top_k=config.positive("num_experts_per_tok", top_k),
        intermediate_size=config.positive("moe_intermediate_size", 512),
        activation=config_fields.activation(config),
        normalize=config.get("norm_topk_prob", bool, True),
        shared_intermediate_size=config.positive("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def hybrid(
    config: ModelConfig,
    mlp: Callable[[int], MLPSpec | MoESpec],
    projections: Callable[[DeltaSpec], Table],
) -> DecoderSpec:
    """A decoder of the generation of Qwen3-Next.

    Args:
        config: configuration of the decoder.
        mlp: what a layer has, by its index.
        projections: where the checkpoint has those of the delta rule.
    """
    config = config_fields.filled(config, _DEFAULTS)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-6), one_plus=True)
    attention = config_fields.attention(
        config,
        qk_norm_eps=norm.eps,
        qk_norm="one_plus",
        output_gate=True,
    )
    delta = delta_spec(config, norm.eps)
    queries = {"self_attn.q_proj": slice(0, 1), "self_attn.gate_proj": slice(1, 2)}
    takes_images = config.architecture.endswith(CONDITIONAL_SUFFIX)
    within = "model.language_model"
    # Text models, too, may have been cut out of multimodal ones by their configuration alone.
    whole = takes_images or has_tensor(config.path, f"{within}.norm.weight")
    root = within if whole else "model"
    names = decoder_names(
        root,
        {
            **PRE_NORMS,
            "mlp.router": "mlp.gate",
            **interleaved(attention.num_heads, queries, attention.head_dim, "self_attn.q_proj"),
            **stacked_qkv(delta, "conv", "linear_attn.conv1d"),
            **projections(delta),
        },
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=attention if kind == "full_attention" else delta,
                mlp=mlp(layer),
                input_norm=norm,
                mlp_norm=norm,
            )
            for layer, kind in enumerate(_kinds(config))
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, attention.head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=StackedExperts(names) if has_stacked_experts(config.path) else names,
        # Tensors of layers that draft tokens, and of the vision tower.
        ignored=(r"mtp\..*", r"(model\.)?visual\..*"),
        notice=TEXT_ALONE if takes_images else "",
    )


def _kinds(config: ModelConfig) -> list[str]:
    """``layer_types``; if none are stated, the last layer of every ``full_attention_interval``."""
    every = config.positive("full_attention_interval")
    layers = range(1, config.positive("num_hidden_layers") + 1)
    kinds = ["linear_attention" if layer % every else "full_attention" for layer in layers]
    return config_fields.layer_kinds(config, kinds, ("full_attention", "linear_attention"))
