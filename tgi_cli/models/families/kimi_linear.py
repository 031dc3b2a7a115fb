"""Kimi Linear (https://arxiv.org/abs/2510.26692).

Three layers of Kimi Delta Attention to one of latent attention without positions; DeepSeek V3's
experts after the first layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.deepseek_fields import grouped_experts, latent_attention, sparse_layers
from tgi_cli.models.delta_fields import SeparateConvs, delta_spec
from tgi_cli.models.spec import DecoderSpec, LayerSpec, Mixer, NormSpec
from tgi_cli.models.weight_map import NUMBERED, ModuleSource, Names, gated_parts, has_tensor

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_shared_experts": 1, "routed_scaling_factor": 2.446, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "num_expert_group": 1,
    "topk_group": 1, "num_experts_per_token": 8, "moe_renormalize": True,
    "model_max_length": 1048576, "rms_norm_eps": 1e-5, "num_experts": 256, "linear_head_dim": 128,
    "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "first_k_dense_replace": 1,
    "moe_router_activation_func": "sigmoid",
}  # fmt: skip
_OTHER_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
"""What the keys of DeepSeek's configuration are called here."""


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/kimi_linear"""
    config = _uniform(config)
    norm = NormSpec(config.get("rms_norm_eps", float))
    latent = replace(latent_attention(config), rope=None)
    rank = config.positive("linear_key_head_dim")
    delta = delta_spec(config, norm.eps, gate="sigmoid", rank=rank)
    mixers: dict[str, Mixer] = {"full_attention": latent, "linear_attention": delta}
    num_layers = config.positive("num_hidden_layers")
    turns = [
        "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)
    ]
    kinds = config_fields.layer_kinds(config, turns, tuple(mixers))
    dense = config_fields.gated_mlp(config)
    experts = grouped_experts(config, softmax=False)
    layer = LayerSpec(mixer=None, mlp=None, input_norm=norm, mlp_norm=norm)
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=config.positive("max_position_embeddings"),
        layers=tuple(
            replace(layer, mixer=mixers[kind], mlp=experts if sparse else dense)
            for kind, sparse in zip(kinds, sparse_layers(config, num_layers), strict=True)
        ),
        final_norm=norm,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=SeparateConvs(_names(config), delta, "self_attn"),
    )


def _uniform(config: ModelConfig) -> ModelConfig:
    """With the keys that DeepSeek's and Qwen's readers know."""
    raw = {**_DEFAULTS, **config.raw}
    raw |= {ours: raw[key] for ours, key in _OTHER_NAMES.items() if key in raw}
    stated = config.get("linear_attn_config", dict, {})
    heads = stated.get("num_heads", raw["linear_num_heads"])
    size = stated.get("head_dim", raw["linear_head_dim"])
    raw |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    raw |= {"linear_key_head_dim": size, "linear_value_head_dim": size}
    raw["linear_conv_kernel_dim"] = stated.get(
        "short_conv_kernel_size", raw["linear_conv_kernel_dim"]
    )
    if raw.get("layer_types") is None and "full_attn_layers" in stated and "kda_layers" in stated:
        full, layers = stated["full_attn_layers"], range(1, raw["num_hidden_layers"] + 1)
        raw["layer_types"] = ["full_attention" if i in full else "linear_attention" for i in layers]
    return replace(config, raw={"topk_method": "noaux_tc", **raw})


def _names(config: ModelConfig) -> Names:
    """As published; transformers 5 writes dense blocks by the name of those with experts."""
    same = ("q_proj", "k_proj", "v_proj", "b_proj", "dt_bias")
    low_rank = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
    moe = "block_sparse_moe"
    dense = moe if has_tensor(config.path, f"model.layers.0.{moe}.down_proj.weight") else "mlp"
    return Names(
        modules={
            "input_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            **{f"linear_attn.{part}": f"self_attn.{part}" for part in same},
            **{f"linear_attn.low_rank.{part}": f"self_attn.{part}" for part in low_rank},
            "linear_attn.A_log": ModuleSource("self_attn.A_log", lambda tensor: tensor.flatten()),
            "linear_attn.norm": "self_attn.o_norm",
            "linear_attn.out_proj": "self_attn.o_proj",
            **gated_parts("mlp", dense),
            **gated_parts("mlp.shared_expert", f"{moe}.shared_experts"),
            "mlp.router": f"{moe}.gate",
            "mlp.router.correction": f"{moe}.gate.e_score_correction_bias",
            **gated_parts("mlp.experts.*", f"{moe}.experts.*", NUMBERED),
        }
    )
