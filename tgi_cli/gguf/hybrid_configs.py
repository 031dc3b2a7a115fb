"""Configurations of architectures with recurrent states or convolutions, as GGUF's keys have them.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.config_parts import (
    Config,
    expert_scale,
    expert_size,
    experts,
    granite_factors,
    is_bamba,
    llama_shape,
    partial_rotary,
    require_sigmoids,
    shared_expert_size,
)
from tgi_cli.gguf.keys import ArchitectureKeys


def qwen35(keys: ArchitectureKeys) -> Config:
    """Qwen 3.5, dense or with experts."""
    config = _delta_shape(keys) | {"model_type": "qwen3_5_text"}
    sections = keys.file.values(f"{keys.architecture}.rope.dimension_sections", int)
    if sections:
        config["rope_parameters"] = {"mrope_section": sections[:3]}
    if keys.architecture == "qwen35":
        return config
    return config | _delta_experts(keys) | {"model_type": "qwen3_5_moe_text"}


def qwen3_next(keys: ArchitectureKeys) -> Config:
    """Qwen3-Next."""
    return _delta_shape(keys) | _delta_experts(keys) | {"model_type": "qwen3_next"}


def _delta_shape(keys: ArchitectureKeys) -> Config:
    return llama_shape(keys) | {
        "layer_types": _linear_layers(keys),
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": keys.whole("ssm.time_step_rank"),
        "linear_value_head_dim": keys.whole("ssm.inner_size") // keys.whole("ssm.time_step_rank"),
        **partial_rotary(keys),
    }


def _delta_experts(keys: ArchitectureKeys) -> Config:
    return {
        "num_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "shared_expert_intermediate_size": shared_expert_size(keys),
        "norm_topk_prob": True,
    }


def _linear_layers(keys: ArchitectureKeys) -> list[str]:
    """The type of each layer: every n-th has full attention, unless a key lists them."""
    every = keys.whole("full_attention_interval", 4)
    linear = keys.flags("attention.recurrent_layers")
    if linear is None:
        linear = [bool((layer + 1) % every) for layer in range(keys.num_layers)]
    return ["linear_attention" if each else "full_attention" for each in linear]


def granite_hybrid(keys: ArchitectureKeys) -> Config:
    """Granite 4, or Bamba. Layers without key-value heads are Mamba-2's.

    Raises:
        UnsupportedModelError: heads are rotated in part, but otherwise than Bamba's.
    """
    kinds = keys.wholes("attention.head_count_kv", keys.num_layers)
    config = llama_shape(keys) | _mamba_shape(keys, kinds)
    if is_bamba(keys):
        return config | _bamba(keys, kinds)
    rotated = keys.flag("rope.scaling.finetuned", True)
    shared = shared_expert_size(keys) if experts(keys) else keys.whole("feed_forward_length")
    return (
        config
        | granite_factors(keys)
        | {
            "model_type": "granitemoehybrid",
            "layer_types": ["attention" if each else "mamba" for each in kinds],
            "position_embedding_type": "rope" if rotated else "nope",
            "shared_intermediate_size": shared,
            "num_local_experts": experts(keys),
            "num_experts_per_tok": keys.whole("expert_used_count", 0, 0),
        }
    )


def granite_moe(keys: ArchitectureKeys) -> Config:
    """Granite 3 with experts: Granite 4 without states and, mostly, without a shared expert."""
    has_shared = keys.has_tensor("blk.0.ffn_down_shexp.weight")
    rotated = keys.flag("rope.scaling.finetuned", True)
    return (
        llama_shape(keys)
        | granite_factors(keys)
        | {
            "model_type": "granitemoehybrid",
            "layer_types": ["attention"] * keys.num_layers,
            "position_embedding_type": "rope" if rotated else "nope",
            "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
            "shared_intermediate_size": shared_expert_size(keys) if has_shared else 0,
            "num_local_experts": experts(keys),
            "num_experts_per_tok": keys.whole("expert_used_count"),
        }
    )


def _bamba(keys: ArchitectureKeys, kinds: list[int]) -> Config:
    scales = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    factor = partial_rotary(keys)["partial_rotary_factor"]
    if factor != 0.5 or experts(keys) or any(map(keys.has, scales)):
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} with heads that are rotated in part is "
            "supported as Bamba's layers alone: half of each head, no factors, no experts",
            "serve the model's safetensors",
        )
    return {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "attn_layer_indices": [layer for layer, heads in enumerate(kinds) if heads],
        "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
    }


def _mamba_shape(keys: ArchitectureKeys, kinds: list[int]) -> Config:
    """Sizes of Mamba-2's layers, which ``kinds`` has as 0, by Granite's names."""
    mamba = next((layer for layer, heads in enumerate(kinds) if not heads), 0)
    heads, width = keys.whole("ssm.time_step_rank"), keys.whole("ssm.inner_size")
    hidden = keys.whole("embedding_length")
    if width % heads or width % hidden:
        raise keys.invalid(f"{heads} heads of a state have {width} channels")
    return {
        "attention_bias": any(
            keys.has_tensor(f"blk.{layer}.attn_q.bias") for layer in range(keys.num_layers)
        ),
        "mamba_expand": width // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_d_state": keys.whole("ssm.state_size"),
        "mamba_n_groups": keys.whole("ssm.group_count"),
        "mamba_d_conv": keys.whole("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has_tensor(f"blk.{mamba}.ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor(f"blk.{mamba}.ssm_in.bias"),
    }


def lfm2(keys: ArchitectureKeys) -> Config:
    """LFM 2, dense or with experts.

    Raises:
        UnsupportedModelError: attention has windows, or experts are not chosen by sigmoids.
    """
    if keys.whole("attention.sliding_window", 0, 0):
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} with a sliding window is not supported",
            "serve the model's safetensors",
        )
    heads = keys.wholes("attention.head_count_kv", keys.num_layers)
    config = llama_shape(keys) | {
        "model_type": "lfm2",
        "norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": keys.whole("shortconv.l_cache"),
        "conv_bias": keys.has_tensor("blk.0.shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if keys.architecture == "lfm2":
        return config
    require_sigmoids(keys)
    dense = keys.whole("leading_dense_block_count", 0, 0)
    return config | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "num_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "use_expert_bias": keys.has_tensor(f"blk.{dense}.exp_probs_b.bias"),
    }


def nemotron(keys: ArchitectureKeys) -> Config:
    """Nemotron-H and Nemotron 3. Layers without key-value heads and width are Mamba-2's."""
    layers = keys.num_layers
    heads = keys.wholes("attention.head_count_kv", layers)
    widths = keys.wholes("feed_forward_length", layers)
    wide = "moe" if experts(keys) else "mlp"
    kinds = [
        "full_attention" if own else wide if width else "linear_attention"
        for own, width in zip(heads, widths, strict=True)
    ]
    mamba, plain = (
        kinds.index(kind) if kind in kinds else 0 for kind in ("linear_attention", "mlp")
    )
    num_heads, width = keys.whole("ssm.time_step_rank"), keys.whole("ssm.inner_size")
    if width % num_heads:
        raise keys.invalid(f"{num_heads} heads of a state have {width} channels")
    norm_keys = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    norm_key = next(filter(keys.has, norm_keys), norm_keys[0])
    config: Config = {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "num_hidden_layers": layers,
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": max(widths) or 1,
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.whole("context_length"),
        "layer_norm_epsilon": keys.real(norm_key, 1e-5),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": width // num_heads,
        "ssm_state_size": keys.whole("ssm.state_size"),
        "n_groups": keys.whole("ssm.group_count"),
        "conv_kernel": keys.whole("ssm.conv_kernel"),
        "use_conv_bias": keys.has_tensor(f"blk.{mamba}.ssm_conv1d.bias"),
        "use_bias": keys.has_tensor(f"blk.{mamba}.ssm_in.bias"),
        "mlp_bias": keys.has_tensor(f"blk.{plain}.ffn_up.bias"),
    }
    if not experts(keys):
        return config
    groups = keys.whole("expert_group_count", 1)
    config |= {
        "n_routed_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.whole("expert_shared_count", 1, 0),
        "moe_shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
        "routed_scaling_factor": expert_scale(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": keys.whole("expert_group_used_count", groups),
    }
    if keys.has("moe_latent_size"):
        config["moe_latent_size"] = keys.whole("moe_latent_size")
    return config
