"""Miniatures of classes that transformers' modules run: one or more of each kind of layer."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import SMALL, Case
from tests.tools.survey_sizes import OF_CONFIGS, SIZES

_GPT = {
    "vocab_size": 256,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {
    "vocab_size": 256,
    "d_model": 64,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "projection_intermediate_size": 32,
    "image_size": 28,
}
_MOE = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}


def _surveyed(config: str, **values: Any) -> Case:
    return Case(config, OF_CONFIGS[config] | values)


ENGINE_CASES: dict[str, Case] = {
    # Recurrent states, alone and beside attention, by functions of ours.
    "Mamba": _surveyed("MambaConfig"),
    "Mamba 2": _surveyed("Mamba2Config"),
    "Falcon Mamba": _surveyed("FalconMambaConfig"),
    "Jamba": _surveyed("JambaConfig"),
    "Falcon-H1": _surveyed("FalconH1Config"),
    "Zamba 2": _surveyed("Zamba2Config"),
    "Ling 3": _surveyed("BailingHybridConfig"),
    # States that the models keep in places of their own.
    "RecurrentGemma": _surveyed("RecurrentGemmaConfig"),
    "RWKV 4": _surveyed("RwkvConfig"),
    "xLSTM": _surveyed("xLSTMConfig"),
    # The same by calls of the module for each sequence.
    "MiniMax": _surveyed("MiniMaxConfig"),
    "Zaya": _surveyed("ZayaConfig"),
    "Qwen 4": _surveyed("Qwen4ExpTextConfig"),
    # Biases that a model computes from its tokens.
    "Doge": _surveyed("DogeConfig"),
    # Latent and sparse attention.
    "A.X K1": _surveyed("AXK1Config"),
    "A.X K2": _surveyed("AXK2Config", index_n_heads=12),
    "HY V4": _surveyed("HYV4Config"),
    "Dots 3 Note": _surveyed("Dots3NoteTextConfig"),
    "MiniMax M3": _surveyed("MiniMaxM3VLTextConfig"),
    "GLM-5.3-Flash": Case(
        "Glm5NextConfig",
        {
            "text_config": OF_CONFIGS["Glm5NextTextConfig"] | {"rms_norm_eps": 1e-3},
            "vision_config": _VISION,
        },
        model="Glm5NextForConditionalGeneration",
    ),
    # Keys and values of different widths, several attentions in a layer.
    "MiMo V2 Flash": _surveyed("MiMoV2FlashConfig"),
    "DiffLlama": _surveyed("DiffLlamaConfig"),
    # Attention by code of their own.
    "GPT-J": Case("GPTJConfig", _GPT | {"rotary_dim": 8}),
    "GPT-Neo": _surveyed("GPTNeoConfig"),
    "CodeGen": Case("CodeGenConfig", _GPT | {"rotary_dim": 8}),
    "BLOOM": Case("BloomConfig", {"vocab_size": 256, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "MPT": Case(
        "MptConfig",
        {"vocab_size": 256, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256},
    ),
    # Positions that are counted from a cache's length, or from the padding token's number.
    "BART": Case("BartConfig", _DECODER),
    "RoBERTa": Case("RobertaConfig", SIZES | {"num_hidden_layers": 3}),
    # Experts with code of their own.
    "DBRX": _surveyed("DbrxConfig"),
    "JetMoE": _surveyed("JetMoeConfig"),
    "Phi-3.5 MoE": Case("PhimoeConfig", _MOE),
    # By default its scores are not scaled, and its logits are 5e-4 off from those in float64.
    "Granite MoE": Case("GraniteMoeConfig", _MOE | {"attention_multiplier": 0.25}),
    "ERNIE 4.5 MoE": Case(
        "Ernie4_5_MoeConfig",
        SMALL | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    ),
}
"""By model, for runs of the whole engine."""
