"""LFM 2 and 3 (https://huggingface.co/LiquidAI): gated short convolutions, some layers with attention.

Layers may have experts (LFM 2 MoE). LFM 3 has norms behind its blocks too, windows, and a gate for
each head of attention.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.mamba_fields import conv_kernel
from tgi_cli.models.spec import (
    AttentionSpec,
    ConvSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)
from tgi_cli.models.weight_map import Names, Source, StackedExperts, has_stacked_experts, stacked

_MODULES = {
    "input_norm": "operator_norm",
    "mixer_output_norm": "post_operator_norm",
    "mlp_norm": "ffn_norm",
    "mlp_output_norm": "post_ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.router": "feed_forward.gate",
    "mlp.router.correction": "feed_forward.expert_bias",
    "mlp.experts.*.gate_proj": "feed_forward.experts.*.w1",
    "mlp.experts.*.up_proj": "feed_forward.experts.*.w3",
    "mlp.experts.*.down_proj": "feed_forward.experts.*.w2",
}
_SECOND = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}
_ROPES: dict[str, Any] = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4},
}
"""What absent ``rope_parameters`` of LFM 3 mean."""


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/lfm2 and .../lfm2_moe"""
    third = config.architecture.startswith("Lfm3")
    sizes = {"num_attention_heads": 16, "hidden_size": 2048, "head_dim": 128} if third else {}
    config = config_fields.filled(config, {"num_attention_heads": 32, **sizes})
    num_heads, num_kv_heads, head_dim = config_fields.heads(config, 4 if third else 8)
    context = config.positive("max_position_embeddings", 128_000)
    hidden_size = config.positive("hidden_size")
    norm = NormSpec(config.get("norm_eps", float, 1e-5))
    output_norm = norm if third and config.get("use_sandwich_norm", bool, True) else None
    bias = third and config.get("attention_bias", bool, False)
    conv = ConvSpec(
        kernel=conv_kernel(config, "conv_L_cache", 7 if third else 3),
        bias=config.get("conv_bias", bool, False),
    )
    kinds = _kinds(config, third)
    windows = config_fields.windows(config, len(kinds), context, 256, kinds)
    if third:
        config = config_fields.filled(config, {"rope_parameters": _ROPES})
        ropes = config_fields.ropes_by_kind(config, head_dim, context, {kind: 1e6 for kind in _ROPES})
    else:
        ropes = (config_fields.rope(config, head_dim, context, 1e6),)
