"""Configurations of models with DeepSeek's latent attention, as GGUF's keys have them.

https://github.com/ggml-org/llama.cpp/blob/master/conversion/deepseek.py
"""

from __future__ import annotations

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.config_parts import (
    SIGMOID,
    SOFTMAX,
    Config,
    expert_scale,
    experts,
    gating_error,
    require_sigmoids,
    rope_fields,
)
from tgi_cli.gguf.keys import ArchitectureKeys


def deepseek(keys: ArchitectureKeys) -> Config:
    """DeepSeek V2 and V3, and models with the same layers: Kimi K2, GLM-4.7-Flash, Youtu-LLM.

    Raises:
        UnsupportedModelError: queries are scaled by position, or experts are chosen in another way.
    """
    if keys.has("attention.temperature_scale"):
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} with scaled queries is not supported as GGUF",
            "serve the model's safetensors",
        )
    config = _latent_shape(keys) | {"rope_interleave": True} | _rope(keys)
    if not experts(keys):
        return config | {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    return config | _experts(keys)


def deepseek32(keys: ArchitectureKeys) -> Config:
    """DeepSeek V3.2: V3, and an indexer in each layer. Raises as :func:`deepseek`."""
    config = deepseek(keys)
    if config.get("model_type") != "deepseek_v3":
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} without experts that are chosen by sigmoids is "
            "not supported",
            "serve the model's safetensors",
        )
    return config | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": keys.whole("attention.indexer.head_count"),
        "index_head_dim": keys.whole("attention.indexer.key_length"),
        "index_topk": keys.whole("attention.indexer.top_k"),
    }


def kimi_linear(keys: ArchitectureKeys) -> Config:
    """Kimi Linear, by its own names. Layers without key-value heads have Kimi Delta Attention.

    Raises:
        UnsupportedModelError: experts are not chosen by sigmoids.
    """
    require_sigmoids(keys)
    groups = keys.whole("expert_group_count", 1)
    full = keys.wholes("attention.head_count_kv", keys.num_layers)
    return _latent_shape(keys) | {
        "model_type": "kimi_linear",
        "model_max_length": keys.whole("context_length"),
        "layer_types": ["full_attention" if each else "linear_attention" for each in full],
        "linear_attn_config": {
            "num_heads": keys.num_heads,
            "head_dim": keys.whole("kda.head_dim"),
            "short_conv_kernel_size": keys.whole("ssm.conv_kernel"),
        },
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_token": keys.whole("expert_used_count"),
        "num_shared_experts": keys.whole("expert_shared_count", 1, 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0, 0),
        "routed_scaling_factor": expert_scale(keys),
        "moe_renormalize": keys.flag("expert_weights_norm", True),
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": groups,
        "topk_group": keys.whole("expert_group_used_count", groups),
    }


def _latent_shape(keys: ArchitectureKeys) -> Config:
    """Sizes of layers with latent attention.

    Newer files have heads as latent attention computes with them, and the checkpoint's sizes in
    keys that end in ``_mla``; older ones have the checkpoint's alone.
    """
    rotated = keys.whole("rope.dimension_count")
    suffix = "_mla" if keys.has("attention.key_length_mla") else ""
    key_length = keys.whole(f"attention.key_length{suffix}")
    if key_length <= rotated:
        raise keys.invalid(f"{rotated} numbers of keys of {key_length} are rotated")
    config: Config = {
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": max(keys.wholes("feed_forward_length", keys.num_layers)),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_heads,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "q_lora_rank": None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": keys.whole(f"attention.value_length{suffix}"),
    }
    if any(keys.has_tensor(f"blk.{layer}.attn_q_a.weight") for layer in range(keys.num_layers)):
        config["q_lora_rank"] = keys.whole("attention.q_lora_rank")
    return config


def _rope(keys: ArchitectureKeys) -> Config:
    """Rotary angles. YaRN's magnitude applies to scores, given as the factor of a logarithm."""
    config = rope_fields(keys)
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn" and keys.has("rope.scaling.yarn_log_multiplier"):
        magnitude = round(keys.real("rope.scaling.yarn_log_multiplier") / 0.1, 6)
        scaling |= {"mscale": magnitude, "mscale_all_dim": magnitude}
    return config


def _experts(keys: ArchitectureKeys) -> Config:
    dense = keys.whole("leading_dense_block_count", 0, 0)
    corrected = keys.has_tensor(f"blk.{dense}.exp_probs_b.bias")
    gating = keys.whole("expert_gating_func", SIGMOID if corrected else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise gating_error(keys, gating)
    groups = keys.whole("expert_group_count", 1)
    config: Config = {
        "n_routed_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.whole("expert_shared_count", 0, 0),
        "first_k_dense_replace": dense,
        "routed_scaling_factor": expert_scale(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": keys.whole("expert_group_used_count", groups),
    }
    if gating == SIGMOID:
        return config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return config | {
        "model_type": "deepseek_v2",
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }
