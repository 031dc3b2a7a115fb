"""Names of models with DeepSeek's latent attention in GGUF files.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

from typing import Any

from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.name_parts import BLOCKS, TOP, FileModule, NameTable


def deepseek_names(keys: ArchitectureKeys) -> NameTable:
    """DeepSeek V2 and V3; the modules of an indexer are V3.2's."""
    block = dict(BLOCKS) | LATENT
    block |= {
        "exp_probs_b": FileModule("mlp.gate.e_score_correction_bias", bare=True),
        "indexer.attn_k": FileModule("self_attn.indexer.wk"),
        "indexer.attn_q_b": FileModule("self_attn.indexer.wq_b"),
        "indexer.k_norm": FileModule("self_attn.indexer.k_norm"),
        "indexer.proj": FileModule("self_attn.indexer.weights_proj"),
    }
    for part in ("gate", "up", "down"):
        block[f"ffn_{part}_shexp"] = FileModule(f"mlp.shared_experts.{part}_proj")
    return NameTable(top=TOP, block=block)


def _heads_joined(keys: Any, values: Any) -> Any:
    """Join [heads, rank, key numbers] and [heads, value numbers, rank] to all rows of each head."""
    own = keys.shape[2]
    joined = values.new_empty(len(values), own + values.shape[1], values.shape[2])
    joined[:, :own], joined[:, own:] = keys.transpose(1, 2), values
    return joined.flatten(0, 1)


LATENT = {
    "attn_q_a": FileModule("self_attn.q_a_proj"),
    "attn_q_a_norm": FileModule("self_attn.q_a_layernorm"),
    "attn_q_b": FileModule("self_attn.q_b_proj"),
    "attn_kv_a_mqa": FileModule("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": FileModule("self_attn.kv_a_layernorm"),
    "attn_kv_b": FileModule("self_attn.kv_b_proj"),
    "attn_k_b": FileModule("self_attn.kv_b_proj", joined=("attn_v_b", _heads_joined)),
}
"""Modules of latent attention. Newer files have what becomes keys apart from what becomes values,
older ones together."""
