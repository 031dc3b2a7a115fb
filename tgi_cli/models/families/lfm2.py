"""LFM 2 (https://arxiv.org/abs/2511.23404): gated short convolutions, a few layers with attention.

The first layers of its mixture of experts have a single feed-forward block.
"""

from __future__ import annotations

from collections.abc import Callable

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from tgi_cli.models.state_fields import short_conv, short_conv_modules
from tgi_cli.models.weight_map import Names, Source, StackedExperts, has_stacked_experts

MODULES = {
    "input_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
TOP = {"model.norm": "model.embedding_norm"}
_MODULES = MODULES | {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.router": "feed_forward.gate",
    "mlp.router.correction": "feed_forward.expert_bias",
    "mlp.experts.*.gate_proj": "feed_forward.experts.*.w1",
    "mlp.experts.*.up_proj": "feed_forward.experts.*.w3",
    "mlp.experts.*.down_proj": "feed_forward.experts.*.w2",
}
_KINDS = ("conv", "full_attention")
_DEFAULTS = {
    "Lfm2ForCausalLM": {"hidden_size": 2560, "intermediate_size": 12288},
    "Lfm2MoeForCausalLM": {"hidden_size": 2048, "intermediate_size": 7168},
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/lfm2 and .../lfm2_moe"""
    config = config_fields.filled(config, _DEFAULTS[config.architecture])
    config = config_fields.filled(config, {"num_attention_heads": 32})
    num_heads, num_kv_heads, head_dim = config_fields.heads(config, 8)
    context = config.positive("max_position_embeddings", 128_000)
    norm = NormSpec(config.get("norm_eps", float, 1e-5))
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm_eps=norm.eps
    )
    conv = short_conv(config, 3)
    num_layers = config.positive("num_hidden_layers", 32)
    full = config.get("full_attn_idxs", list, list(range(num_layers)))
    kinds = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    mixture = config.architecture == "Lfm2MoeForCausalLM"
    dense = MLPSpec(intermediate_size=_intermediate_size(config, mixture))
    num_dense = config.get("num_dense_layers", int, 2) if mixture else num_layers
    experts = _experts(config) if mixture else dense
    tied = config_fields.stated(config, "tie_embedding", "tie_word_embeddings")
    return DecoderSpec(
        vocab_size=config.positive("vocab_size", 65536),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=conv if kind == "conv" else attention,
                mlp=dense if layer < num_dense else experts,
                input_norm=norm,
                mlp_norm=norm,
            )
            for layer, kind in enumerate(config_fields.layer_kinds(config, kinds, _KINDS))
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context, 1e6),),
        tie_word_embeddings=config.get(tied, bool, True),
        source=_source(config),
    )


def _source(config: ModelConfig) -> Callable[[str], Source]:
    names = Names(modules={**_MODULES, **short_conv_modules(config)}, top=TOP)
    stacks = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
    return StackedExperts(names, *stacks) if has_stacked_experts(config.path) else names


def _experts(config: ModelConfig) -> MoESpec:
    return MoESpec(
        num_experts=config.positive("num_experts", 32),
        top_k=config.positive("num_experts_per_tok", 4),
        intermediate_size=config.positive("moe_intermediate_size", 1792),
        router="sigmoid_topk",
        normalize=config.get("norm_topk_prob", bool, True),
        scaling=config.get("routed_scaling_factor", float, 1.0),
        router_correction=config.get("use_expert_bias", bool, True),
    )


def _intermediate_size(config: ModelConfig, mixture: bool) -> int:
    """A dense model's is two thirds of the stated one, times a factor, rounded up."""
    if mixture:
        return config.positive("intermediate_size")
    size = config.positive(config_fields.stated(config, "block_ff_dim", "intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return size
    size = int(2 * size / 3)
    if config.raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    size = int(config.get("block_ffn_dim_multiplier", float, 1.0) * size)
    multiple = config.positive("block_multiple_of", 256)
    return -(-size // multiple) * multiple
