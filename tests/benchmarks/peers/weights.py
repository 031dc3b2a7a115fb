"""Bytes that a model's weights and its cache take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def tensor_bytes(file: Path) -> dict[str, int]:
    """Bytes of each tensor of a safetensors file, from its header alone."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def decoded_bytes(checkpoint: Path, layer_bits: int = 16, head_bits: int = 16) -> int:
    """Bytes of weights read for one decoded token.

    That is all of them, but for an embedding that is not the output layer too: of it one row is
    read. (Of a mixture of experts it would be less.) ``layer_bits`` and ``head_bits``: to which
    the layers' matrices and the head, of 16 bits in the files, are quantized at loading; their
    scales are not counted.
    """
    sizes: dict[str, int] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        sizes |= tensor_bytes(file)
    tied = json.loads((checkpoint / "config.json").read_text()).get("tie_word_embeddings", False)
    total = 0
    head = "embed_tokens.weight" if tied else "lm_head.weight"
    for name, size in sizes.items():
        if name.endswith(head):
            total += size * head_bits // 16
        elif name.endswith("_proj.weight"):
            total += size * layer_bits // 16
        elif not name.endswith("embed_tokens.weight"):
            total += size
    return total


def cache_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Bytes of keys and values that one token leaves in the cache."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_dim * element_bytes)
