"""Computes the bytes of a model's weights and KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXPERTS = (".experts.", ".block_sparse_moe.input_linear", ".block_sparse_moe.output_linear")
"""Parts of the names of experts' weights."""


def tensor_bytes(file: Path) -> dict[str, int]:
    """Return the bytes of each tensor of a safetensors file from its header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def decoded_bytes(checkpoint: Path, layer_bits: int = 16, head_bits: int = 16) -> int:
    """Return the bytes of weights that decoding one token reads.

    That is all weights except an embedding that is not tied to the output head, of which only one
    row is read, and except the experts that a token does not choose. Scales of quantized weights
    are not counted.

    Args:
        layer_bits: bits to which the layers' 16-bit matrices are quantized on load.
        head_bits: bits to which the 16-bit output head is quantized on load.
    """
    sizes: dict[str, int] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        sizes |= tensor_bytes(file)
    config = json.loads((checkpoint / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or 1
    chosen = config.get("num_experts_per_tok", experts) / experts
    total = 0
    head = "embed_tokens.weight" if tied else "lm_head.weight"
    for name, size in sizes.items():
        if name.endswith(head):
            total += size * head_bits // 16
        elif any(part in name for part in EXPERTS):
            total += int(size * chosen) * layer_bits // 16
        elif name.endswith("_proj.weight"):
            total += size * layer_bits // 16
        elif not name.endswith("embed_tokens.weight"):
            total += size
    return total


def cache_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Return the bytes of one token in the KV cache."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_dim * element_bytes)
