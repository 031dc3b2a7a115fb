"""Miniature configurations of the built-in families, one or more for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What most configurations of transformers take. Nothing but sizes and special tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """A miniature model.

    Attributes:
        config: name of transformers' configuration class.
        values: its arguments.
        stored: what config.json says otherwise, for both sides; ``...`` removes a key.
        model: name of transformers' model class, where it is not the causal LM of ``config``.
        embedding_std: of the token vectors before the model scales them.
        qk_norm: mean weight of the norms of queries and keys.
        attention: transformers' implementation. (Its eager one adds Falcon's ALiBi twice.)
        shortest: length of prompts where transformers computes shorter ones in another way.
    """

    config: str
    values: Mapping[str, Any]
    stored: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    embedding_std: float = 0.1
    qk_norm: float = 1.5
    attention: str = "eager"
    shortest: int = 0


LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [1.5 + i / 2 for i in range(6)],
}

WINDOW = 40
"""Longer than a chunk of the engine, shorter than most prompts."""

QWEN = SMALL | {"tie_word_embeddings": True}
UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
GEMMA = SMALL | {"head_dim": 16}
GEMMA_STD = 0.065
GEMMA2 = GEMMA | {"num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
GEMMA4 = GEMMA | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 256,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 20.0,
}
GEMMA4_DENSE = GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
GEMMA3N = GEMMA | {
    "num_hidden_layers": 6,
    "intermediate_size": [96, 96, 80, 96, 96, 64],
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 200,
    "laurel_rank": 8,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "activation_sparsity_pattern": [0.5, 0.9, 0.0, 0.0, 0.3, 0.0],
}
LLAMA4 = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "attention_chunk_size": WINDOW,
    "floor_scale": 30,
    "attn_scale": 0.2,
}
LLAMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
GEMMA3 = GEMMA2 | {"sliding_window_pattern": 3}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PHI3 = SMALL | {"sliding_window": WINDOW}
PHI4 = SMALL | {
    "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
    "tie_word_embeddings": True,
}
GRANITE = SMALL | {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
OLMO3 = SMALL | {"num_hidden_layers": 4, "sliding_window": WINDOW}

ALL_KEYS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
GPT2 = {
    "vocab_size": 256,
    "n_positions": 256,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMOLLM3 = SMALL | {"num_hidden_layers": 4}
MIXTRAL = SMALL | {"num_local_experts": 6, "num_experts_per_tok": 3}
QWEN_MOE = SMALL | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
QWEN2_MOE = QWEN_MOE | {"shared_expert_intermediate_size": 40}
GPT_OSS = MIXTRAL | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

DELTA: dict[str, Any] = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-3,
}
"""Three layers of the gated delta rule to one of attention.

What a random query reads of a state is now and then as short as 1e-5, by cancellation, and a norm
with an epsilon of 1e-6 makes a thousand times more of it, and of its rounding errors: logits would
differ by up to 2e-4.
"""
DELTA_ALONE = {
    key: value for key, value in DELTA.items() if key not in ("head_dim", "rope_parameters")
}
DELTA_SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [2, 2, 2],
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
LATENT = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
DEEPSEEK = LATENT | {
    "num_hidden_layers": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40.0}
KIMI_LINEAR = {key: value for key, value in LATENT.items() if key != "q_lora_rank"} | {
    "num_hidden_layers": 4,
    "layer_types": DELTA["layer_types"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-3,
}
CONV = SMALL | {"num_hidden_layers": 4}
LFM2 = CONV | {
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_multiple_of": 32,
}
LFM2_MOE = LFM2 | {"num_dense_layers": 1, "num_experts": 6, "moe_intermediate_size": 48}
LFM2_MOE = {key: v for key, v in LFM2_MOE.items() if key != "block_multiple_of"}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2}
GRANITE4 = (
    GRANITE
    | MAMBA
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "shared_intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
    }
)

NEMOTRON = {key: v for key, v in SMALL.items() if key != "num_hidden_layers"} | {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 4,
}
NEMOTRON3 = NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

CASES: dict[str, Case] = {
    "Llama 3": Case("LlamaConfig", SMALL | {"rope_parameters": LLAMA3_ROPE}),
    "Mistral": Case("MistralConfig", SMALL | {"sliding_window": WINDOW}),
    "Qwen 2": Case("Qwen2Config", QWEN),
    "Qwen 2, upper windows": Case(
        "Qwen2Config", QWEN | UPPER_WINDOWS, stored={"layer_types": ..., "rms_norm_eps": ...}
    ),
    "Qwen 3": Case("Qwen3Config", QWEN | {"head_dim": 24}),
    "Qwen 3, upper windows": Case(
        "Qwen3Config",
        SMALL | UPPER_WINDOWS | {"attention_bias": True, "rope_parameters": YARN_ROPE},
        stored={"head_dim": ..., "tie_word_embeddings": ...},
    ),
    "Gemma": Case("GemmaConfig", GEMMA, embedding_std=GEMMA_STD),
    "Gemma 2": Case("Gemma2Config", GEMMA2, embedding_std=GEMMA_STD),
    "Gemma 3": Case(
        "Gemma3TextConfig",
        GEMMA3
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
            "final_logit_softcapping": 20.0,
        },
        embedding_std=GEMMA_STD,
    ),
    "Gemma 3, older spelling": Case(
        "Gemma3TextConfig",
        GEMMA2,
        stored={
            "layer_types": ...,
            "sliding_window_pattern": 2,
            "rope_parameters": ...,
            "rope_theta": 20000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        embedding_std=GEMMA_STD,
    ),
    "Gemma 3 with images": Case(
        "Gemma3Config",
        {
            "text_config": GEMMA3,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 255,
        },
        model="Gemma3ForConditionalGeneration",
        embedding_std=GEMMA_STD,
    ),
    "Gemma 4": Case("Gemma4TextConfig", GEMMA4, embedding_std=GEMMA_STD, qk_norm=0.6),
    "Gemma 4, dense": Case("Gemma4TextConfig", GEMMA4_DENSE, embedding_std=GEMMA_STD, qk_norm=0.6),
    "Gemma 4 with experts": Case(
        "Gemma4TextConfig",
        GEMMA4_DENSE
        | {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 6,
            "moe_intermediate_size": 32,
        },
        embedding_std=GEMMA_STD,
        qk_norm=0.6,
    ),
    "Gemma 4 with images": Case(
        "Gemma4Config",
        {"text_config": GEMMA4, "vision_config": VISION, "audio_config": None},
        model="Gemma4ForConditionalGeneration",
        embedding_std=GEMMA_STD,
        qk_norm=0.6,
    ),
    "Gemma 3n": Case("Gemma3nTextConfig", GEMMA3N, embedding_std=GEMMA_STD, qk_norm=0.6),
    "Llama 4": Case("Llama4TextConfig", LLAMA4),
    "Llama 4, dense layers between": Case(
        "Llama4TextConfig",
        LLAMA4
        | {
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "Llama 4 with images": Case(
        "Llama4Config",
        {"text_config": LLAMA4, "vision_config": LLAMA4_VISION},
        model="Llama4ForConditionalGeneration",
    ),
    "Phi-3": Case("Phi3Config", PHI3),
    "Phi-4": Case("Phi3Config", PHI4 | {"original_max_position_embeddings": 16}, shortest=17),
    "Phi-4, within its first context": Case(
        "Phi3Config",
        PHI4 | {"original_max_position_embeddings": 200},
        stored={
            "rope_parameters": ...,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": LONGROPE["short_factor"],
                "long_factor": LONGROPE["long_factor"],
            },
        },
    ),
    "Granite": Case("GraniteConfig", GRANITE),
    "OLMo 2": Case("Olmo2Config", SMALL),
    "OLMo 3": Case(
        "Olmo3Config",
        OLMO3,
        stored={
            "layer_types": ...,
            "rope_parameters": ...,
            "rope_theta": 20000.0,
            "rope_scaling": {key: v for key, v in YARN_ROPE.items() if key != "rope_theta"},
        },
    ),
    "SmolLM 3": Case("SmolLM3Config", SMOLLM3),
    "SmolLM 3, windows": Case(
        "SmolLM3Config",
        SMOLLM3 | {"use_sliding_window": True, "sliding_window": WINDOW},
        stored={"layer_types": ..., "no_rope_layers": ..., "no_rope_layer_interval": 2},
    ),
    "Seed-OSS": Case("SeedOssConfig", SMALL | {"head_dim": 24}),
    "GPT-2": Case("GPT2Config", GPT2),
    "GPT-2, scores scaled by layer": Case(
        "GPT2Config", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}
    ),
    "GPT-BigCode": Case("GPTBigCodeConfig", GPT2),
    "GPT-BigCode, many keys": Case("GPTBigCodeConfig", GPT2 | {"multi_query": False}),
    "GPT-NeoX": Case("GPTNeoXConfig", ALL_KEYS),
    "GPT-NeoX, sequential": Case(
        "GPTNeoXConfig", ALL_KEYS | {"use_parallel_residual": False, "attention_bias": False}
    ),
    "Falcon, multi-query": Case("FalconConfig", ALL_KEYS),
    "Falcon, multi-head": Case(
        "FalconConfig", ALL_KEYS | {"multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "Falcon RW": Case(
        "FalconConfig",
        ALL_KEYS
        | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
        | {"hidden_size": 96, "num_attention_heads": 6},
        attention="sdpa",
    ),
    "Falcon, grouped": Case(
        "FalconConfig", ALL_KEYS | {"new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "StarCoder 2": Case("Starcoder2Config", SMALL | {"sliding_window": WINDOW}),
    "Mixtral": Case(
        "MixtralConfig", MIXTRAL | {"sliding_window": WINDOW}, stored={"rope_parameters": ...}
    ),
    "Qwen 2 MoE": Case("Qwen2MoeConfig", QWEN2_MOE),
    "Qwen 2 MoE, lower windows": Case(
        "Qwen2MoeConfig",
        QWEN2_MOE
        | {
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 3,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
        },
        stored={"layer_types": ...},
    ),
    "Qwen 3 MoE": Case(
        "Qwen3MoeConfig",
        QWEN_MOE | {"head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
        stored={"num_local_experts": ..., "num_experts": 8},
    ),
    "Qwen 3 MoE, windows": Case(
        "Qwen3MoeConfig",
        QWEN_MOE
        | {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "Kimi Linear": Case("KimiLinearConfig", KIMI_LINEAR),
    "Kimi Linear, as published": Case(
        "KimiLinearConfig",
        KIMI_LINEAR | {"n_group": 4, "topk_group": 3, "norm_topk_prob": False},
        stored={
            "layer_types": ...,
            "mlp_layer_types": ...,
            "first_k_dense_replace": 1,
            "moe_router_activation_func": "sigmoid",
            "linear_head_dim": ...,
            "linear_num_heads": ...,
            "linear_conv_kernel_dim": ...,
            "linear_attn_config": {
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [3],
                "kda_layers": [1, 2, 4],
            },
        },
    ),
    "OLMo Hybrid": Case("OlmoHybridConfig", DELTA_ALONE | {"rms_norm_eps": 1e-3}),
    "OLMo Hybrid, no positions": Case(
        "OlmoHybridConfig",
        DELTA_ALONE
        | {
            "layer_types": None,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "linear_allow_neg_eigval": False,
        },
        stored={"layer_types": ...},
    ),
    "Qwen3-Next": Case("Qwen3NextConfig", DELTA | DELTA_SHARED),
    "Qwen3-Next, a dense layer": Case(
        "Qwen3NextConfig",
        DELTA
        | DELTA_SHARED
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
        stored={
            "layer_types": ...,
            "full_attention_interval": 2,
            "rope_parameters": ...,
            "rope_theta": 20000.0,
        },
    ),
    "Qwen 3.5": Case("Qwen3_5TextConfig", DELTA | {"tie_word_embeddings": True}),
    "Qwen 3.5 with images": Case(
        "Qwen3_5Config",
        {
            "text_config": DELTA | {"rope_parameters": MROPE},
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": False,
        },
        model="Qwen3_5ForConditionalGeneration",
    ),
    "Qwen 3.5 MoE": Case("Qwen3_5MoeTextConfig", DELTA | DELTA_SHARED),
    "Qwen 3.5 MoE with images": Case(
        "Qwen3_5MoeConfig",
        {
            "text_config": DELTA | DELTA_SHARED | {"rope_parameters": MROPE},
            "vision_config": QWEN_VISION,
        },
        model="Qwen3_5MoeForConditionalGeneration",
    ),
    "DeepSeek V2": Case(
        "DeepseekV2Config",
        DEEPSEEK
        | {
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "rope_parameters": DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "DeepSeek V2 Lite": Case(
        "DeepseekV2Config",
        DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
        stored={
            "rope_parameters": ...,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 64,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "DeepSeek V3": Case(
        "DeepseekV3Config", DEEPSEEK | {"rope_parameters": DEEPSEEK_ROPE}, stored={"head_dim": ...}
    ),
    "DeepSeek V3.2": Case(
        "DeepseekV32Config",
        DEEPSEEK
        | {"index_topk": 24, "index_head_dim": 32, "index_n_heads": 16}
        | {"rope_parameters": DEEPSEEK_ROPE},
    ),
    "DeepSeek V3.2, short texts": Case(
        "DeepseekV32Config", DEEPSEEK | {"index_topk": 192, "index_n_heads": 2}
    ),
    "DeepSeek V3, pairs half apart": Case(
        "DeepseekV3Config",
        DEEPSEEK | {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False},
    ),
    "Kimi K2": Case(
        "DeepseekV3Config",
        DEEPSEEK
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": DEEPSEEK_ROPE | {"rope_theta": 50000.0, "beta_fast": 1.0},
        },
    ),
    "GLM-4.7-Flash": Case(
        "Glm4MoeLiteConfig",
        {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
        | {"n_group": 1, "topk_group": 1, "v_head_dim": 32},
    ),
    # With a padding token, transformers overwrites that token's loaded vector with zeros.
    "Youtu-LLM": Case("YoutuConfig", LATENT | {"pad_token_id": None}),
    "gpt-oss": Case(
        "GptOssConfig",
        GPT_OSS,
        stored={
            "rope_parameters": ...,
            "rope_theta": 150000,
            "rope_scaling": GPT_OSS_ROPE,
            "swiglu_alpha": ...,
        },
    ),
    "LFM 2": Case("Lfm2Config", LFM2),
    "LFM 2, older spelling": Case(
        "Lfm2Config",
        CONV | {"full_attn_idxs": [1, 3], "conv_bias": True, "block_auto_adjust_ff_dim": False},
        stored={
            "layer_types": ...,
            "intermediate_size": ...,
            "block_ff_dim": 96,
            "tie_word_embeddings": ...,
            "rope_parameters": ...,
            "rope_theta": 1e6,
        },
    ),
    "LFM 2 MoE": Case("Lfm2MoeConfig", LFM2_MOE),
    "LFM 3": Case("Lfm3Config", CONV | {"num_hidden_layers": 6, "sliding_window": WINDOW}),
    "Granite 4": Case("GraniteMoeHybridConfig", GRANITE4),
    "Granite 4, dense and rotated": Case(
        "GraniteMoeHybridConfig",
        GRANITE4
        | {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "time_step_limit": (0.4, 1.5),
        },
    ),
    "Nemotron-H": Case(
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        stored={"layers_block_type": ..., "hybrid_override_pattern": "M-*-"},
    ),
    "Nemotron 3": Case(
        "NemotronHConfig", NEMOTRON3 | {"time_step_min": 1e-9}, stored={"time_step_min": 0.0}
    ),
    "Nemotron 3, latent experts": Case(
        "NemotronHConfig",
        NEMOTRON3 | {"moe_latent_size": 32, "n_groups": 1, "use_bias": True},
    ),
    "Bamba": Case(
        "BambaConfig",
        SMALL | MAMBA | {"attn_layer_indices": [1], "mlp_bias": True, "mamba_d_conv": 3},
    ),
}
