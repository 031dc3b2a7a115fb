"""What model families call the modules of GGUF files, by architecture.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tgi_cli.gguf.deepseek_names import deepseek_names
from tgi_cli.gguf.gemma_names import gemma3n_names, gemma4_names, gemma_names
from tgi_cli.gguf.hybrid_names import (
    granite_hybrid_names,
    kimi_linear_names,
    lfm2_names,
    nemotron_names,
    qwen3_next_names,
    qwen35_names,
)
from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.name_parts import (
    BLOCKS,
    TOP,
    FileModule,
    NameTable,
    by_heads,
    neighbours_apart,
    with_fused,
)
from tgi_cli.gguf.transformers_names import (
    ernie_moe_names,
    glm4_moe_names,
    glm_names,
    hunyuan_names,
    minimax_names,
    nemotron4_names,
    phi_names,
    stablelm_names,
)


def _llama_names(keys: ArchitectureKeys) -> NameTable:
    return NameTable(top=TOP, block=with_fused(keys, dict(BLOCKS)))


def _rotated_names(keys: ArchitectureKeys) -> NameTable:
    """The names of architectures whose rotated pairs are neighbours in the file."""
    block = dict(BLOCKS)
    if keys.architecture == "llama" and keys.whole("expert_count", 0, 0):  # Mixtral
        block["ffn_gate_inp"] = FileModule("block_sparse_moe.gate")
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            block[f"ffn_{ours}_exps"] = FileModule(f"block_sparse_moe.experts.{{e}}.{theirs}")
    for name, heads in (("attn_q", keys.num_heads), ("attn_k", keys.num_kv_heads)):
        block[name] = replace(block[name], rows=neighbours_apart(heads))
    return NameTable(top=TOP, block=with_fused(keys, block))


def _llama4_names(keys: ArchitectureKeys) -> NameTable:
    """Pairs are neighbours in checkpoints, too."""
    block = {
        name: replace(module, name=module.name.replace("mlp.", "feed_forward."))
        for name, module in BLOCKS.items()
    }
    block["ffn_gate_inp"] = FileModule("feed_forward.router")
    return NameTable(top=TOP, block=with_fused(keys, block))


def _phi3_names(keys: ArchitectureKeys) -> NameTable:
    fused = {
        "attn_qkv": FileModule("self_attn.qkv_proj"),
        "ffn_up": FileModule("mlp.gate_up_proj"),
    }
    return NameTable(top=TOP, block={**BLOCKS, **fused})


def _post_norm_names(keys: ArchitectureKeys) -> NameTable:
    """OLMo 2, Seed-OSS and EXAONE 4."""
    block = dict(BLOCKS) | {
        "post_attention_norm": FileModule("post_attention_layernorm"),
        "post_ffw_norm": FileModule("post_feedforward_layernorm"),
    }
    return NameTable(top=TOP, block=with_fused(keys, block))


def _starcoder2_names(keys: ArchitectureKeys) -> NameTable:
    block = dict(BLOCKS) | {"ffn_up": FileModule("mlp.c_fc"), "ffn_down": FileModule("mlp.c_proj")}
    return NameTable(top=TOP, block=with_fused(keys, block))


def _gpt2_names(keys: ArchitectureKeys) -> NameTable:
    """GPT-2, whose checkpoints have weights transposed, and GPT-BigCode."""
    transposed = keys.architecture == "gpt2"
    return NameTable(
        layers="transformer.h",
        top={
            "token_embd": FileModule("transformer.wte"),
            "position_embd": FileModule("transformer.wpe"),
            "output_norm": FileModule("transformer.ln_f"),
            "output": FileModule("lm_head"),
        },
        block={
            "attn_norm": FileModule("ln_1"),
            "attn_qkv": FileModule("attn.c_attn", transposed=transposed),
            "attn_output": FileModule("attn.c_proj", transposed=transposed),
            "ffn_norm": FileModule("ln_2"),
            "ffn_up": FileModule("mlp.c_fc", transposed=transposed),
            "ffn_down": FileModule("mlp.c_proj", transposed=transposed),
        },
    )


def _gpt_neox_names(keys: ArchitectureKeys) -> NameTable:
    heads = keys.num_heads
    order = [head + part * heads for head in range(heads) for part in range(3)]
    return NameTable(
        layers="gpt_neox.layers",
        top={
            "token_embd": FileModule("gpt_neox.embed_in"),
            "output_norm": FileModule("gpt_neox.final_layer_norm"),
            "output": FileModule("embed_out"),
        },
        block={
            "attn_norm": FileModule("input_layernorm"),
            "attn_qkv": FileModule("attention.query_key_value", by_heads(order)),
            "attn_output": FileModule("attention.dense"),
            "ffn_norm": FileModule("post_attention_layernorm"),
            "ffn_up": FileModule("mlp.dense_h_to_4h"),
            "ffn_down": FileModule("mlp.dense_4h_to_h"),
        },
    )


def _falcon_names(keys: ArchitectureKeys) -> NameTable:
    heads, groups = keys.num_heads, keys.num_kv_heads
    order: list[int] = []
    for group in range(groups):
        order += range(group * heads // groups, (group + 1) * heads // groups)
        order += [heads + group, heads + groups + group]
    two_norms = keys.has_tensor("blk.0.attn_norm_2.weight")
    return NameTable(
        layers="transformer.h",
        top={
            "token_embd": FileModule("transformer.word_embeddings"),
            "output_norm": FileModule("transformer.ln_f"),
            "output": FileModule("lm_head"),
        },
        block={
            "attn_norm": FileModule("ln_mlp" if two_norms else "input_layernorm"),
            "attn_norm_2": FileModule("ln_attn"),
            "attn_qkv": FileModule("self_attention.query_key_value", by_heads(order)),
            "attn_output": FileModule("self_attention.dense"),
            "ffn_up": FileModule("mlp.dense_h_to_4h"),
            "ffn_down": FileModule("mlp.dense_4h_to_h"),
        },
    )


def _gpt_oss_names(keys: ArchitectureKeys) -> NameTable:
    block = dict(BLOCKS) | {
        "post_attention_norm": FileModule("post_attention_layernorm"),
        "attn_sinks": FileModule("self_attn.sinks", bare=True),
        "ffn_gate_inp": FileModule("mlp.router"),
    }
    return NameTable(top=TOP, block=with_fused(keys, block))


_TABLES: dict[str, Callable[[ArchitectureKeys], NameTable]] = {
    "arcee": _rotated_names,
    "chatglm": glm_names,
    "deepseek2": deepseek_names,
    "deepseek32": deepseek_names,
    "dots1": glm4_moe_names,
    "ernie4_5-moe": ernie_moe_names,
    "exaone4": _post_norm_names,
    "falcon": _falcon_names,
    "gemma": gemma_names,
    "gemma2": gemma_names,
    "gemma3": gemma_names,
    "gemma3n": gemma3n_names,
    "gemma4": gemma4_names,
    "glm4": glm_names,
    "glm4moe": glm4_moe_names,
    "gpt-oss": _gpt_oss_names,
    "gpt2": _gpt2_names,
    "gptneox": _gpt_neox_names,
    "granite": _rotated_names,
    "granitehybrid": granite_hybrid_names,
    "granitemoe": granite_hybrid_names,
    "hunyuan-dense": hunyuan_names,
    "kimi-linear": kimi_linear_names,
    "lfm2": lfm2_names,
    "lfm2moe": lfm2_names,
    "llama": _rotated_names,
    "llama4": _llama4_names,
    "minimax-m2": minimax_names,
    "mistral3": _rotated_names,
    "nemotron": nemotron4_names,
    "nemotron_h": nemotron_names,
    "nemotron_h_moe": nemotron_names,
    "olmo": _rotated_names,
    "olmo2": _post_norm_names,
    "phi2": phi_names,
    "phi3": _phi3_names,
    "qwen35": qwen35_names,
    "qwen35moe": qwen35_names,
    "qwen3next": qwen3_next_names,
    "seed_oss": _post_norm_names,
    "smollm3": _rotated_names,
    "stablelm": stablelm_names,
    "starcoder": _gpt2_names,
    "starcoder2": _starcoder2_names,
}
"""Tables by architecture, for those whose names or orders differ from Llama's in safetensors."""


def name_table(keys: ArchitectureKeys) -> NameTable:
    """The names of a file's architecture. Raises as :class:`ArchitectureKeys`."""
    return _TABLES.get(keys.architecture, _llama_names)(keys)
