"""config.json of architectures that transformers' modules run, from the keys of GGUF files.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.config_parts import (
    Config,
    expert_scale,
    expert_size,
    experts,
    layer_types,
    llama_shape,
    require_sigmoids,
)
from tgi_cli.gguf.keys import ArchitectureKeys


def ministral3(keys: ArchitectureKeys) -> Config:
    """Mistral Small 3 and later; Ministral 3, whose queries grow with their position."""
    config = llama_shape(keys)
    if not keys.has("attention.temperature_scale"):
        return config | {"model_type": "mistral", "sliding_window": None}
    scaling = config.pop("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        raise keys.invalid("its queries are scaled by position, and its angles not by YaRN")
    magnitude = keys.real("rope.scaling.yarn_log_multiplier", 1.0)
    beta = keys.real("attention.temperature_scale")
    return config | {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "sliding_window": None,
        "rope_parameters": {
            **scaling,
            "rope_theta": config.pop("rope_theta"),
            "mscale": magnitude,
            "mscale_all_dim": magnitude,
            "llama_4_scaling_beta": beta,
        },
    }


def cohere(keys: ArchitectureKeys) -> Config:
    """Command R."""
    return _layer_norm_shape(keys) | {
        "model_type": "cohere",
        "logit_scale": keys.real("logit_scale"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def cohere2(keys: ArchitectureKeys) -> Config:
    """Command R7B and A."""
    return _layer_norm_shape(keys) | {
        "model_type": "cohere2",
        "logit_scale": keys.real("logit_scale"),
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": layer_types(keys, 4),
    }


def phi(keys: ArchitectureKeys) -> Config:
    """Phi-1 to Phi-2."""
    return _layer_norm_shape(keys) | _rotated_part(keys) | {"model_type": "phi"}


def stablelm(keys: ArchitectureKeys) -> Config:
    """StableLM; the 12B model has one norm for attention and feed-forward block."""
    return (
        _layer_norm_shape(keys)
        | _rotated_part(keys)
        | {
            "model_type": "stablelm",
            "use_qkv_bias": _has_bias(keys),
            "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight"),
            "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        }
    )


def nemotron(keys: ArchitectureKeys) -> Config:
    """Nemotron 3 and 4, and Minitron."""
    return (
        llama_shape(keys)
        | _rotated_part(keys)
        | {
            "model_type": "nemotron",
            "norm_eps": keys.real("attention.layer_norm_epsilon"),
            "attention_bias": _has_bias(keys),
            "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
        }
    )


def olmo(keys: ArchitectureKeys) -> Config:
    """OLMo 1."""
    return llama_shape(keys) | {
        "model_type": "olmo",
        "clip_qkv": keys.real("attention.clamp_kqv", 0.0) or None,
    }


def olmoe(keys: ArchitectureKeys) -> Config:
    """OLMoE."""
    return llama_shape(keys) | {
        "model_type": "olmoe",
        "num_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": keys.real("attention.clamp_kqv", 0.0) or None,
    }


def glm(keys: ArchitectureKeys) -> Config:
    """GLM-4 of 2024."""
    return (
        llama_shape(keys)
        | _rotated_part(keys)
        | {
            "model_type": "glm",
            "attention_bias": _has_bias(keys),
        }
    )


def glm4(keys: ArchitectureKeys) -> Config:
    """GLM-4 and Z1 of 2025.

    Raises:
        UnsupportedModelError: the decoder of a model that takes images, whose heads llama.cpp's
            converter has rearranged.
    """
    _refuse_axes(keys)
    return glm(keys) | {"model_type": "glm4"}


def glm4_moe(keys: ArchitectureKeys) -> Config:
    """GLM-4.5 to GLM-4.7. Raises as :func:`glm4`."""
    _refuse_axes(keys)
    return (
        _deepseek_experts(keys)
        | _rotated_part(keys)
        | {
            "model_type": "glm4_moe",
            "attention_bias": _has_bias(keys),
            "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        }
    )


def dots1(keys: ArchitectureKeys) -> Config:
    """dots.llm1."""
    return _deepseek_experts(keys) | {
        "model_type": "dots1",
        "attention_bias": _has_bias(keys),
        "sliding_window": None,
        "layer_types": ["full_attention"] * keys.num_layers,
    }


def minimax_m2(keys: ArchitectureKeys) -> Config:
    """MiniMax M2."""
    require_sigmoids(keys)
    return (
        llama_shape(keys)
        | _rotated_part(keys)
        | {
            "model_type": "minimax_m2",
            "intermediate_size": expert_size(keys),
            "num_local_experts": experts(keys),
            "num_experts_per_tok": keys.whole("expert_used_count"),
        }
    )


def exaone4(keys: ArchitectureKeys) -> Config:
    """EXAONE 4; with windows, layers without one have no positions."""
    window = keys.whole("attention.sliding_window", 0, 0)
    return llama_shape(keys) | {
        "model_type": "exaone4",
        "sliding_window": window or None,
        "layer_types": layer_types(keys, 4 if window else 1),
    }


def ernie(keys: ArchitectureKeys) -> Config:
    """ERNIE 4.5, dense."""
    return llama_shape(keys) | {
        "model_type": "ernie4_5",
        "use_bias": keys.has_tensor("blk.0.ffn_down.bias"),
    }


def ernie_moe(keys: ArchitectureKeys) -> Config:
    """ERNIE 4.5 with experts behind the first layers."""
    return llama_shape(keys) | {
        "model_type": "ernie4_5_moe",
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "moe_intermediate_size": expert_size(keys),
        "moe_num_experts": experts(keys),
        "moe_k": keys.whole("expert_used_count"),
        "moe_num_shared_experts": keys.whole("expert_shared_count", 0, 0),
        "moe_layer_start_index": keys.whole("leading_dense_block_count", 0, 0),
        "moe_layer_interval": keys.whole("interleave_moe_layer_step", 1),
    }


def arcee(keys: ArchitectureKeys) -> Config:
    """AFM."""
    return llama_shape(keys) | {
        "model_type": "arcee",
        "attention_bias": _has_bias(keys),
        "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
    }


def hunyuan(keys: ArchitectureKeys) -> Config:
    """HunYuan, dense. The base of the angles is scaled in the file."""
    return llama_shape(keys) | {
        "model_type": "hunyuan_v1_dense",
        "attention_bias": _has_bias(keys),
    }


def _layer_norm_shape(keys: ArchitectureKeys) -> Config:
    eps = keys.real("attention.layer_norm_epsilon")
    return llama_shape(keys) | {"layer_norm_eps": eps, "attention_bias": _has_bias(keys)}


def _has_bias(keys: ArchitectureKeys) -> bool:
    return keys.has_tensor("blk.0.attn_q.bias") or keys.has_tensor("blk.0.attn_qkv.bias")


def _rotated_part(keys: ArchitectureKeys) -> Config:
    """The share of a head that is rotated, which is no default of these architectures."""
    rotated = keys.whole("rope.dimension_count", keys.head_dim)
    return {"partial_rotary_factor": rotated / keys.head_dim}


def _refuse_axes(keys: ArchitectureKeys) -> None:
    if any(keys.file.values(f"{keys.architecture}.rope.dimension_sections", int)):
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} of a model that takes images is not supported "
            "as GGUF",
            "serve the model's safetensors",
        )


def _deepseek_experts(keys: ArchitectureKeys) -> Config:
    """Experts as DeepSeek V3 has them, beside shared ones and behind dense layers."""
    require_sigmoids(keys)
    return llama_shape(keys) | {
        "n_routed_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "n_shared_experts": keys.whole("expert_shared_count", 0, 0),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0, 0),
        "routed_scaling_factor": expert_scale(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "n_group": keys.whole("expert_group_count", 1),
        "topk_group": keys.whole("expert_group_used_count", 1),
    }
