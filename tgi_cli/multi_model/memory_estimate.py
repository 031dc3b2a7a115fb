"""How much memory a model takes before it was ever loaded: a guess from its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgi_cli.files import FileRefusedError, read_json

PROCESS_BYTES = 400 << 20
"""Memory of a model's launcher, router and model server, without the model."""
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
"""Kinds of files with weights; the first that there are count."""
_UNKNOWN_CACHE = 0.25
"""Cache of a model whose config.json does not have the usual fields, as a share of the weights."""
_CACHE_ELEMENT = 2
"""Bytes of a number in the cache."""
_MAX_CACHED_TOKENS = 32_768
"""Tokens of a cache of no explicit size that are counted, as its pages are taken when written."""
_MOST_BYTES = 1 << 50
"""Upper bound of an estimate: config.json may state any numbers, and its model's own server refuses
it only when it is loaded."""


def estimate_memory(path: Path, cached_tokens: int | None) -> int:
    """Estimate the bytes of a loaded model: its files, its KV cache, and its processes.

    Args:
        path: Folder of the model, or a GGUF file.
        cached_tokens: Size of the KV cache if it is set. Default: the model's context.
    """
    weights = weight_bytes(path)
    config: Any = None
    if path.is_dir():
        try:
            config = read_json(path / "config.json")
        except (OSError, ValueError, FileRefusedError):
            config = None
    per_token = _kv_bytes(config) if isinstance(config, Mapping) else None
    if per_token is None or not isinstance(config, Mapping):
        return weights + int(weights * _UNKNOWN_CACHE) + PROCESS_BYTES
    context = config.get("max_position_embeddings")
    known = context if isinstance(context, int) and context > 0 else _MAX_CACHED_TOKENS
    tokens = cached_tokens or min(known, _MAX_CACHED_TOKENS)
    return min(weights + tokens * per_token + PROCESS_BYTES, _MOST_BYTES)


def weight_bytes(path: Path) -> int:
    """Size of the files with weights."""
    if path.is_file():
        return path.stat().st_size
    for pattern in _WEIGHTS:
        sizes = [file.stat().st_size for file in path.glob(pattern) if file.is_file()]
        if sizes:
            return sum(sizes)
    return 0


def _kv_bytes(config: Mapping[str, Any]) -> int | None:
    """Bytes of keys and values of a token in all layers, or None if config.json has others."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    width, own = config.get("hidden_size"), config.get("head_dim")
    kv_heads = config.get("num_key_value_heads") or heads
    numbers = (layers, heads, width, kv_heads)
    if not all(isinstance(each, int) and each > 0 for each in numbers):
        return None
    assert isinstance(layers, int)
    assert isinstance(heads, int)
    assert isinstance(width, int)
    assert isinstance(kv_heads, int)
    head_size = own if isinstance(own, int) and own > 0 else width // heads
    return 2 * layers * kv_heads * head_size * _CACHE_ELEMENT
