"""Sizes of the survey's miniatures: of transformers' configurations in general, and by class.

A miniature has what the published models have: their patterns of layers, experts behind dense
layers, windows and chunks shorter than the texts, layers that share keys and values.
"""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PLAIN = {key: size for key, size in SIZES.items() if key not in ("sliding_window", "is_decoder")}
_PLAIN["num_key_value_heads"] = 2

_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK = _PLAIN | _MLA | _EXPERTS | {"first_k_dense_replace": 1}
_INDEXED = _DEEPSEEK | {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 16}
_DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_PURE = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "pad_token_id": 0}
_CONVS = ["conv", "full_attention", "conv", "conv"]
_LINEAR = "linear_attention"
_FALCON_H = {"mamba_d_ssm": 128, "head_dim": 16}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_RELATIVE = _PLAIN | {
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 24,
    "d_rel": 4,
    "rel_extent": 40,
    "log_scaling_n_floor": 16,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def _without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


OF_CONFIGS: dict[str, dict[str, Any]] = {
    "AXK1Config": _DEEPSEEK,
    "AXK2Config": _without(_INDEXED, "n_group", "topk_group", "first_k_dense_replace")
    | {"gated_norm_rank": 4},
    "BailingHybridConfig": _PLAIN
    | _MLA
    | {"head_dim": 16, "layer_group_size": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "BambaConfig": _PLAIN | _MAMBA2 | {"attn_layer_indices": [1]},
    "BigBirdConfig": SIZES | {"attention_type": "original_full"},
    "CohereCompassTextConfig": _PLAIN
    | {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [3, 3, 2],
            },
            "full_attention": None,
        },
    },
    "DbrxConfig": {
        "vocab_size": 256,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "ffn_config": {
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 64,
        },
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
    },
    "DeepseekOcr2TextConfig": _PLAIN | _EXPERTS | {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "DeepseekV2Config": _DEEPSEEK | {"topk_method": "greedy"},
    "DeepseekV32Config": _INDEXED,
    "DeepseekV3Config": _DEEPSEEK,
    "DiffLlamaConfig": _PLAIN,
    "DogeConfig": _PLAIN,
    "Dots3NoteTextConfig": _INDEXED
    | {
        "head_dim": 24,
        "shared_experts_intermediate_size": 48,
        "sliding_window": 24,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 28,
        "swa_qk_nope_head_dim": 20,
        "swa_v_head_dim": 12,
    },
    "FalconH1Config": _PLAIN | _MAMBA2 | _FALCON_H,
    "FalconMambaConfig": _PURE | {"state_size": 8},
    "Gemma3nTextConfig": _PLAIN
    | {
        "head_dim": 16,
        "sliding_window": 24,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 8,
        "laurel_rank": 8,
    },
    "Gemma4TextConfig": _PLAIN
    | {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "num_hidden_layers": 12,
        "num_kv_shared_layers": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
    },
    "GitConfig": _without(_PLAIN, "num_key_value_heads") | {"vision_config": _TOWER},
    "Glm4MoeLiteConfig": _DEEPSEEK,
    "Glm5NextTextConfig": _without(_INDEXED, "first_k_dense_replace")
    | {
        "index_kpool": 4,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "GlmMoeDsaConfig": _INDEXED,
    "GPTNeoConfig": SIZES
    | {"num_layers": 4, "num_heads": 4, "window_size": 24, "num_hidden_layers": 4}
    | {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybridConfig": _PLAIN
    | _MAMBA2
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
    },
    "HYV4Config": _without(_INDEXED, "first_k_dense_replace"),
    "Inkling2TextConfig": _without(_RELATIVE, "intermediate_size")
    | {"n_layers_per_attn_res_block": 2, "unpadded_vocab_size": 256},
    "InklingTextConfig": _RELATIVE
    | {"n_shared_experts": 2, "logits_mup_width_multiplier": 1.0}
    | {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "JambaConfig": _PLAIN
    | {
        "mamba_d_state": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "JetMoeConfig": _PLAIN | {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "KimiLinearConfig": _PLAIN
    | _MLA
    | {
        "q_lora_rank": None,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "layer_types": [_LINEAR] * 3 + ["full_attention"],
    },
    "Kosmos2_5TextConfig": {
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "embed_dim": 64,
        "layers": 4,
        "ffn_dim": 96,
        "attention_heads": 4,
    },
    "Lfm2Config": _PLAIN | {"layer_types": _CONVS, "block_auto_adjust_ff_dim": False},
    "Lfm2MoeConfig": _PLAIN
    | {
        "layer_types": _CONVS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "Lfm3Config": _PLAIN | {"head_dim": 16, "sliding_window": 24},
    "Llama4TextConfig": _PLAIN
    | {
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 24,
        "num_local_experts": 2,
        "floor_scale": 16,
    },
    "LongcatFlashConfig": _PLAIN
    | _MLA
    | {
        "num_layers": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 96,
        "qk_head_dim": 24,
        "head_dim": 8,
    },
    "Mamba2Config": _PURE
    | {"state_size": 16, "num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2}
    | {"chunk_size": 16},
    "MambaConfig": _PURE | {"state_size": 8},
    "MarianConfig": SIZES
    | {"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    "MiMoV2FlashConfig": _PLAIN
    | _EXPERTS
    | {"head_dim": 16, "v_head_dim": 12, "sliding_window": 24, "n_shared_experts": None},
    "MiniCPM3Config": _PLAIN | _MLA,
    "MiniMaxConfig": _PLAIN | {"head_dim": 16, "block_size": 16, "num_local_experts": 4},
    "MiniMaxM3VLTextConfig": _PLAIN
    | {
        "head_dim": 16,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
    },
    "MistralLarge4TextConfig": _INDEXED,
    "MuseSparkTextConfig": _PLAIN
    | {
        "head_dim": 16,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_hidden_size": 48,
    },
    "NemotronHConfig": _PLAIN
    | {
        "num_hidden_layers": 5,
        "layers_block_type": [
            "linear_attention",
            "mlp",
            "full_attention",
            "moe",
            "linear_attention",
        ],
        "head_dim": 16,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "OlmoeConfig": _PLAIN | {"num_experts": 4, "num_experts_per_tok": 2},
    "OlmoHybridConfig": _PLAIN | {"num_key_value_heads": 4},
    "Phi4MultimodalConfig": _PLAIN
    | {
        "vision_config": _TOWER | {"num_hidden_layers": 2, "crop_size": 28},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "Qwen3_5MoeTextConfig": _PLAIN | _DELTA | _DELTA_EXPERTS,
    "Qwen3_5TextConfig": _PLAIN | _DELTA,
    "Qwen3NextConfig": _PLAIN
    | _DELTA
    | _DELTA_EXPERTS
    | {"decoder_sparse_step": 1, "norm_topk_prob": True},
    "Qwen3OmniMoeTextConfig": _PLAIN
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Qwen4ExpTextConfig": _PLAIN
    | _DELTA
    | _DELTA_EXPERTS
    | {
        "linear_value_head_dim": 16,
        "hc_lowrank": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 24,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 2],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "split_ngram_parts": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    },
    "RecurrentGemmaConfig": _PLAIN
    | {"num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 24},
    "RwkvConfig": _PURE | {"num_hidden_layers": 4, "context_length": 512, "rescale_every": 2},
    "Step3p7TextConfig": _PLAIN
    | {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
    },
    "xLSTMConfig": _PURE | {"hidden_size": 128, "num_heads": 4, "chunk_size": 16},
    "XmodConfig": _PLAIN | {"is_decoder": True, "default_language": "en_XX"},
    # Where they are tied, transformers 5.23 initializes its embeddings anew after loading them.
    "YoutuConfig": _PLAIN | _MLA | {"tie_word_embeddings": False},
    "Zamba2Config": _PLAIN
    | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
        "mamba_d_state": 16,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_expand": 2,
        "chunk_size": 16,
        "num_mem_blocks": 1,
    },
    "ZambaConfig": _PLAIN
    | {
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "use_mamba_kernels": False,
    },
    "ZayaConfig": _PLAIN
    | {
        "head_dim": 16,
        "num_experts": 2,
        "moe_intermediate_size": 32,
        "router_hidden_size": 16,
    },
}
"""By configuration class; instead of what is tried in general."""

TRIED: tuple[dict[str, Any], ...] = (
    {"num_key_value_heads": 2, "head_dim": 16},
    {"num_key_value_heads": 2},
    {},
    {"sliding_window": None, "num_key_value_heads": 2, "head_dim": 16},
    _MLA,
    {"d_model": 64, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    {"rotary_dim": 8, "n_embd": 64, "n_head": 4, "n_layer": 4},
    {"attention_types": [[["global", "local"], 2]]},
    {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": ...},
    _EXPERTS | {"num_key_value_heads": 4, "head_dim": 16, "first_k_dense_replace": 1},
)
"""Beside :data:`SIZES`, in this order: not every configuration takes every size."""


def candidates(config_class: str) -> list[dict[str, Any]]:
    """Arguments of a configuration class, to be tried one after the other."""
    if config_class in OF_CONFIGS:
        return [OF_CONFIGS[config_class]]
    return [
        {key: size for key, size in (SIZES | values).items() if size is not ...} for values in TRIED
    ]
