"""Names of architectures with recurrent states or convolutions in GGUF files.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

from typing import Any

from tgi_cli.gguf.config_parts import is_bamba
from tgi_cli.gguf.deepseek_names import LATENT
from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.name_parts import (
    BLOCKS,
    TOP,
    FileModule,
    NameTable,
    by_heads,
    neighbours_apart,
    norm_less_one,
    with_fused,
)

_MOST_OUTPUTS = 1 << 22
"""Limit of queries, keys and values of linear attention, whose order is a list."""


def lfm2_names(keys: ArchitectureKeys) -> NameTable:
    block = dict(BLOCKS) | {
        "attn_norm": FileModule("operator_norm"),
        "attn_output": FileModule("self_attn.out_proj"),
        "attn_q_norm": FileModule("self_attn.q_layernorm"),
        "attn_k_norm": FileModule("self_attn.k_layernorm"),
        "ffn_norm": FileModule("ffn_norm"),
        "ffn_gate_inp": FileModule("feed_forward.gate"),
        "exp_probs_b": FileModule("feed_forward.expert_bias", bare=True),
        "shortconv.conv": FileModule("conv.conv", middle=True),
        "shortconv.in_proj": FileModule("conv.in_proj"),
        "shortconv.out_proj": FileModule("conv.out_proj"),
    }
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        block[f"ffn_{ours}"] = FileModule(f"feed_forward.{theirs}")
        block[f"ffn_{ours}_exps"] = FileModule(f"feed_forward.experts.{{e}}.{theirs}")
    norm = FileModule("model.embedding_norm")
    top = TOP | {"token_embd_norm": norm, "output_norm": norm}
    return NameTable(top=top, block=with_fused(keys, block))


def qwen35_names(keys: ArchitectureKeys) -> NameTable:
    """Value heads of linear attention alternate between the key heads that they share.

    Checkpoints have the value heads of a key head together. A decay is stored as the factor, not
    as its logarithm.
    """
    key_heads, value_heads = keys.whole("ssm.group_count"), keys.whole("ssm.time_step_rank")
    key_dim, value_dim = keys.whole("ssm.state_size"), keys.whole("ssm.inner_size") // value_heads
    shared = value_heads // key_heads
    if value_heads % key_heads or value_dim * value_heads != keys.whole("ssm.inner_size"):
        raise keys.invalid(f"{value_heads} value heads cannot share {key_heads} key heads")
    keep = 2 * key_heads * key_dim
    if keep + value_heads * value_dim > _MOST_OUTPUTS:
        raise keys.invalid(f"{key_heads} key heads have {key_dim} numbers")
    order = [key + turn * key_heads for key in range(key_heads) for turn in range(shared)]
    values = by_heads(order)
    rows = [*range(keep)]
    rows += [keep + head * value_dim + each for head in order for each in range(value_dim)]

    def mixed(tensor: Any) -> Any:
        return tensor[rows]

    block = dict(BLOCKS) | {
        "post_attention_norm": FileModule("post_attention_layernorm"),
    }
    block = {name: norm_less_one(name, module) for name, module in block.items()}
    block = with_fused(keys, block) | {
        "attn_qkv": FileModule("linear_attn.in_proj_qkv", mixed),
        "attn_gate": FileModule("linear_attn.in_proj_z", values),
        "ssm_conv1d": FileModule("linear_attn.conv1d", mixed, middle=True),
        "ssm_beta": FileModule("linear_attn.in_proj_b", values),
        "ssm_alpha": FileModule("linear_attn.in_proj_a", values),
        "ssm_dt": FileModule("linear_attn.dt_bias", values, bare=True),
        "ssm_a": FileModule("linear_attn.A_log", values, numbers=_logarithm, bare=True),
        "ssm_norm": FileModule("linear_attn.norm"),
        "ssm_out": FileModule("linear_attn.out_proj", columns=tuple(order)),
    }
    top = {name: norm_less_one(name, module) for name, module in TOP.items()}
    return NameTable(top=top, block=block)


def _logarithm(tensor: Any) -> Any:
    """The logarithm of a decay rate, which GGUF stores as -exp(logarithm)."""
    return (-tensor).log()


def qwen3_next_names(keys: ArchitectureKeys) -> NameTable:
    """As Qwen 3.5's, with value heads in the checkpoints' order.

    Older files have the projections of a key head together, as checkpoints do (``ssm_in``).
    """
    block = dict(BLOCKS) | {"post_attention_norm": FileModule("post_attention_layernorm")}
    block = {name: norm_less_one(name, module) for name, module in block.items()}
    block = with_fused(keys, block) | {
        "attn_qkv": FileModule("linear_attn.in_proj_qkv"),
        "attn_gate": FileModule("linear_attn.in_proj_z"),
        "ssm_in": FileModule("linear_attn.in_proj_qkvz"),
        "ssm_conv1d": FileModule("linear_attn.conv1d", middle=True),
        "ssm_ba": FileModule("linear_attn.in_proj_ba"),
        "ssm_dt": FileModule("linear_attn.dt_bias", bare=True),
        "ssm_a": FileModule("linear_attn.A_log", numbers=_logarithm, bare=True),
        "ssm_norm": FileModule("linear_attn.norm"),
        "ssm_out": FileModule("linear_attn.out_proj"),
    }
    top = {name: norm_less_one(name, module) for name, module in TOP.items()}
    return NameTable(top=top, block=block)


def granite_hybrid_names(keys: ArchitectureKeys) -> NameTable:
    """Granite 4 and Bamba: Mamba-2 layers, and attention whose rotated pairs are neighbours."""
    block = dict(BLOCKS)
    for name, heads in (("attn_q", keys.num_heads), ("attn_k", keys.num_kv_heads)):
        block[name] = FileModule(block[name].name, neighbours_apart(heads))
    if is_bamba(keys):
        block["ffn_norm"] = FileModule("pre_ff_layernorm")
        for part in ("gate", "up", "down"):
            block[f"ffn_{part}"] = FileModule(f"feed_forward.{part}_proj")
        block = with_fused(keys, block) | _mamba("mamba")
        return NameTable(
            top=TOP | {"output_norm": FileModule("model.final_layernorm")}, block=block
        )
    block["ffn_gate_inp"] = FileModule("block_sparse_moe.router.layer")
    for part in ("gate", "up", "down"):
        block[f"ffn_{part}_exps"] = FileModule(f"block_sparse_moe.experts.{{e}}.{part}_proj")
        for suffix in ("", "_shexp"):  # without experts, there is only the shared MLP
            block[f"ffn_{part}{suffix}"] = FileModule(f"shared_mlp.{part}_proj")
    block = with_fused(keys, block) | _mamba("mamba")
    return NameTable(top=TOP, block=block)


def nemotron_names(keys: ArchitectureKeys) -> NameTable:
    """Nemotron-H and Nemotron 3, whose layers are one block each."""
    block = {"attn_norm": FileModule("norm"), "attn_output": FileModule("mixer.o_proj")}
    for part in "qkv":
        block[f"attn_{part}"] = FileModule(f"mixer.{part}_proj")
    for part in ("up", "down"):
        block[f"ffn_{part}"] = FileModule(f"mixer.{part}_proj")
        block[f"ffn_{part}_exps"] = FileModule(f"mixer.experts.{{e}}.{part}_proj")
        block[f"ffn_{part}_shexp"] = FileModule(f"mixer.shared_experts.{part}_proj")
    block |= {
        "ffn_gate_inp": FileModule("mixer.gate"),
        "exp_probs_b": FileModule("mixer.gate.e_score_correction_bias", bare=True),
        "ffn_latent_down": FileModule("mixer.fc1_latent_proj"),
        "ffn_latent_up": FileModule("mixer.fc2_latent_proj"),
        **_mamba("mixer"),
    }
    top = {
        "token_embd": FileModule("backbone.embeddings"),
        "output_norm": FileModule("backbone.norm_f"),
        "output": FileModule("lm_head"),
    }
    return NameTable(layers="backbone.layers", top=top, block=block)


def kimi_linear_names(keys: ArchitectureKeys) -> NameTable:
    """Kimi Linear: Kimi Delta Attention, and latent attention as in DeepSeek's files."""
    moe = "block_sparse_moe"
    block = dict(BLOCKS) | LATENT
    block |= {
        "ffn_gate_inp": FileModule(f"{moe}.gate"),
        "exp_probs_b": FileModule(f"{moe}.gate.e_score_correction_bias", bare=True),
        "ssm_beta": FileModule("self_attn.b_proj"),
        "ssm_dt": FileModule("self_attn.dt_bias", bare=True),
        "ssm_a": FileModule("self_attn.A_log", numbers=_logarithm, bare=True, flat=True),
        "ssm_norm": FileModule("self_attn.o_norm"),
    }
    for part in "qkv":
        block[f"ssm_conv1d_{part}"] = FileModule(f"self_attn.{part}_conv1d", middle=True)
    for part in ("f_a", "f_b", "g_a", "g_b"):
        block[f"ssm_{part}"] = FileModule(f"self_attn.{part}_proj")
    for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        block[f"ffn_{part}_exps"] = FileModule(f"{moe}.experts.{{e}}.{theirs}")
        block[f"ffn_{part}_shexp"] = FileModule(f"{moe}.shared_experts.{part}_proj")
    return NameTable(top=TOP, block=block)


def _mamba(prefix: str) -> dict[str, FileModule]:
    """Modules of Mamba-2, whose vectors may be matrices in files."""
    return {
        "ssm_in": FileModule(f"{prefix}.in_proj"),
        "ssm_conv1d": FileModule(f"{prefix}.conv1d", middle=True),
        "ssm_dt": FileModule(f"{prefix}.dt_bias", bare=True),
        "ssm_a": FileModule(f"{prefix}.A_log", numbers=_logarithm, bare=True, flat=True),
        "ssm_d": FileModule(f"{prefix}.D", bare=True, flat=True),
        "ssm_norm": FileModule(f"{prefix}.norm", flat=True),
        "ssm_out": FileModule(f"{prefix}.out_proj"),
    }
