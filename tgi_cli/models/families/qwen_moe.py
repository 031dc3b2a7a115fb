"""Qwen's mixtures of experts: Qwen3-MoE (https://arxiv.org/abs/2505.09388), Qwen2-MoE.

Qwen 2 has an expert that every token passes, Qwen 3 norms on queries and keys. Either may have
layers with a single feed-forward block in between.
"""

from __future__ import annotations

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)
from tgi_cli.models.weight_map import PRE_NORMS, Names, StackedExperts, has_stacked_experts

NAMES = Names(
    modules={
        **PRE_NORMS,
        "mlp.router": "mlp.gate",
    }
)


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/qwen3_moe and .../qwen2_moe"""
    third = config.architecture.startswith("Qwen3")
    num_heads, num_kv_heads, head_dim = config_fields.heads(config, 4 if third else 16)
    context = config.positive("max_position_embeddings", 32768)
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-6))
    windows = _windows(config, context, third)
    bias = config.get("attention_bias" if third else "qkv_bias", bool, not third)
    dense = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
    )
    sparse = _experts(config, third)
    has_experts = sparse_layers(config, len(windows))
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
                    bias=bias,
                    output_bias=bias and third,
                    window=window,
                    qk_norm_eps=norm.eps if third else None,
                ),
                mlp=sparse if layer in has_experts else dense,
                input_norm=norm,
                mlp_norm=norm,
            )
            for layer, window in enumerate(windows)
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=StackedExperts(NAMES) if has_stacked_experts(config.path) else NAMES,
    )


def _experts(config: ModelConfig, third: bool) -> MoESpec:
    # transformers 5 writes Qwen 3's number of experts under Mixtral's name for it.
    key = "num_local_experts" if "num_local_experts" in config.raw else "num_experts"
    return MoESpec(
        num_experts=config.positive(key),
        top_k=config.positive("num_experts_per_tok", 8 if third else 4),
        intermediate_size=config.positive("moe_intermediate_size"),
        activation=config_fields.activation(config),
        normalize=config.get("norm_topk_prob", bool, False),
        shared_intermediate_size=(
            None if third else config.positive("shared_expert_intermediate_size", 5632)
        ),
        shared_gate=not third,
    )


def sparse_layers(config: ModelConfig, num_layers: int) -> set[int]:
    """Layers with experts. Raises ModelError for layers that are no numbers."""
    step = config.positive("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", list, [])
    if not all(isinstance(layer, int) for layer in dense):
        raise config.invalid(f"'mlp_only_layers' is {dense}")
    return set(range(step - 1, num_layers, step)) - set(dense)


def _windows(config: ModelConfig, context: int, third: bool) -> tuple[int | None, ...]:
    """Only if switched on: in every layer of Qwen 3, in every other of Qwen 2's first ones."""
    num_layers = config.positive("num_hidden_layers")
    if not config.get("use_sliding_window", bool, False):
        return (None,) * num_layers
    kinds = None
    if not third:
        windowed = range(0, config.get("max_window_layers", int, 28), 2)
        kinds = [
            "sliding_attention" if layer in windowed else "full_attention"
            for layer in range(num_layers)
        ]
    return config_fields.windows(config, num_layers, context, 4096, kinds)
