"""Configurations of models with DeepSeek's latent attention, as GGUF's keys have them.

https://github.com/ggml-org/llama.cpp/blob/master/conversion/deepseek.py
"""

from __future__ import annotations

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.config_parts import Config, experts, rope_fields
from tgi_cli.gguf.keys import ArchitectureKeys

_SOFTMAX, _SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""


def deepseek(keys: ArchitectureKeys) -> Config:
    """DeepSeek V2 and V3, and what has the same layers: Kimi K2, GLM-4.7-Flash, Youtu-LLM.

    Newer files have heads as latent attention computes with them, and the checkpoint's sizes in
    keys that end in ``_mla``; older ones have the checkpoint's alone.

    Raises:
        UnsupportedModelError: queries are scaled by position, or experts are chosen otherwise.
    """
    if keys.has("attention.temperature_scale"):
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} with scaled queries is not supported as GGUF",
            "serve the model's safetensors",
        )
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
        "rope_interleave": True,
        **_rope(keys),
    }
    if keys.has_tensor("blk.0.attn_q_a.weight"):
        config["q_lora_rank"] = keys.whole("attention.q_lora_rank")
    if not experts(keys):
        return config | {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    return config | _experts(keys)


def _rope(keys: ArchitectureKeys) -> Config:
    """Rotary angles; YaRN's magnitude is one of scores, which a logarithm's factor states."""
    config = rope_fields(keys)
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn" and keys.has("rope.scaling.yarn_log_multiplier"):
        magnitude = round(keys.real("rope.scaling.yarn_log_multiplier") / 0.1, 6)
        scaling |= {"mscale": magnitude, "mscale_all_dim": magnitude}
    return config


def _experts(keys: ArchitectureKeys) -> Config:
    dense = keys.whole("leading_dense_block_count", 0, 0)
    corrected = keys.has_tensor(f"blk.{dense}.exp_probs_b.bias")
    gating = keys.whole("expert_gating_func", _SIGMOID if corrected else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedModelError(
            f"{keys.file.path}: experts that are chosen by function {gating} are not supported",
            "serve the model's safetensors",
        )
    groups = keys.whole("expert_group_count", 1)
    config: Config = {
        "n_routed_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.whole("expert_shared_count", 0, 0),
        "first_k_dense_replace": dense,
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": keys.whole("expert_group_used_count", groups),
    }
    if gating == _SIGMOID:
        return config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return config | {
        "model_type": "deepseek_v2",
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }
