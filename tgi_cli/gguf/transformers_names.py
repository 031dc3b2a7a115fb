"""Names of architectures that transformers' modules run in GGUF files.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

from tgi_cli.gguf.deepseek_names import deepseek_names
from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.name_parts import (
    BLOCKS,
    TOP,
    FileModule,
    NameTable,
    norm_less_one,
    with_fused,
)


def phi_names(keys: ArchitectureKeys) -> NameTable:
    """Phi-1 to Phi-2."""
    block = dict(BLOCKS) | {
        "attn_output": FileModule("self_attn.dense"),
        "ffn_up": FileModule("mlp.fc1"),
        "ffn_down": FileModule("mlp.fc2"),
    }
    top = TOP | {"output_norm": FileModule("model.final_layernorm")}
    return NameTable(top=top, block=with_fused(keys, block))


def stablelm_names(keys: ArchitectureKeys) -> NameTable:
    """StableLM; the norm of each head is a tensor in checkpoints."""
    block = dict(BLOCKS)
    for part in ("q", "k"):
        block[f"attn_{part}_norm"] = FileModule(f"self_attn.{part}_layernorm.norms.{{e}}")
    return NameTable(top=TOP, block=with_fused(keys, block))


def nemotron4_names(keys: ArchitectureKeys) -> NameTable:
    """Nemotron 3 and 4."""
    block = {name: norm_less_one(name, module) for name, module in BLOCKS.items()}
    top = {name: norm_less_one(name, module) for name, module in TOP.items()}
    return NameTable(top=top, block=with_fused(keys, block))


def glm_names(keys: ArchitectureKeys) -> NameTable:
    """GLM-4, of 2024 and 2025: gates and ups in one tensor, as in checkpoints."""
    block = dict(BLOCKS) | {
        "ffn_up": FileModule("mlp.gate_up_proj"),
        "post_attention_norm": FileModule("post_self_attn_layernorm"),
        "post_ffw_norm": FileModule("post_mlp_layernorm"),
    }
    return NameTable(top=TOP, block=with_fused(keys, block))


def glm4_moe_names(keys: ArchitectureKeys) -> NameTable:
    """GLM-4.5 and dots.llm1, with experts as DeepSeek's."""
    block = dict(deepseek_names(keys).block)
    if keys.architecture == "glm4moe":
        block["post_attention_norm"] = FileModule("post_attention_layernorm")
    return NameTable(top=TOP, block=with_fused(keys, block))


def minimax_names(keys: ArchitectureKeys) -> NameTable:
    """MiniMax M2, with Mixtral's names of experts."""
    block = dict(BLOCKS) | {
        "ffn_gate_inp": FileModule("block_sparse_moe.gate"),
        "exp_probs_b": FileModule("block_sparse_moe.e_score_correction_bias", bare=True),
    }
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        block[f"ffn_{ours}_exps"] = FileModule(f"block_sparse_moe.experts.{{e}}.{theirs}")
    return NameTable(top=TOP, block=with_fused(keys, block))


def ernie_moe_names(keys: ArchitectureKeys) -> NameTable:
    """ERNIE 4.5 with experts."""
    block = dict(BLOCKS)
    correction = "mlp.moe_statics.e_score_correction_bias"
    block["exp_probs_b"] = FileModule(correction, bare=True, single=True)
    for part in ("gate", "up", "down"):
        block[f"ffn_{part}_shexp"] = FileModule(f"mlp.shared_experts.{part}_proj")
    return NameTable(top=TOP, block=with_fused(keys, block))


def hunyuan_names(keys: ArchitectureKeys) -> NameTable:
    """HunYuan, dense."""
    block = dict(BLOCKS) | {
        "attn_q_norm": FileModule("self_attn.query_layernorm"),
        "attn_k_norm": FileModule("self_attn.key_layernorm"),
    }
    return NameTable(top=TOP, block=with_fused(keys, block))
