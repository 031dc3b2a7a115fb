"""GGUF files of miniature models: metadata of tokenizers, and a Llama with tensors of zeros."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tgi_cli import demo
from tgi_cli.gguf.reader import GGUFFile, read_gguf
from tgi_cli.gguf.values import Value
from tgi_cli.gguf.writer import TensorSource, write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

WIDTH, HEADS, INNER = 64, 4, 96

_PIECES = "▁t he in ▁a re on ▁the er at nd ▁s ▁w is or ▁th en it an ▁i ▁▁ ▁▁▁▁ ing ed ▁and tt ss"
"""The best first."""

SPM_TOKENS: tuple[tuple[str, float, int], ...] = (
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((piece, -float(rank), NORMAL) for rank, piece in enumerate(_PIECES.split())),
    *((letter, -100.0 - rank, NORMAL) for rank, letter in enumerate("▁abcdefghijklmnoprstuvwxyz.")),
    ("<|user|>", 0.0, USER_DEFINED),
)
"""A vocabulary of SentencePiece's kind: texts, scores and types. It has no q."""


def spm_metadata(**keys: Value | None) -> dict[str, Value]:
    """Metadata of :data:`SPM_TOKENS`; ``keys`` replace theirs, and None leaves one out."""
    own: dict[str, Any] = {
        "tokens": [text for text, _, _ in SPM_TOKENS],
        "scores": [score for _, score, _ in SPM_TOKENS],
        "token_type": [kind for _, _, kind in SPM_TOKENS],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {"tokenizer.ggml.model": "llama"} | _keys(own | keys)


def demo_metadata(**keys: Value | None) -> dict[str, Value]:
    """Metadata of the bundled model's tokenizer, which is byte-level BPE."""
    found = json.loads((demo.model_path() / "tokenizer.json").read_text())
    config = json.loads((demo.model_path() / "tokenizer_config.json").read_text())
    vocabulary = found["model"]["vocab"]
    special = {token["content"]: token["id"] for token in found["added_tokens"]}
    texts = {index: text for text, index in (vocabulary | special).items()}
    tokens = [texts[index] for index in range(len(texts))]
    own: dict[str, Any] = {
        "tokens": tokens,
        "token_type": [CONTROL if text in special else NORMAL for text in tokens],
        "merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in found["model"]["merges"]
        ],
        "pre": "gpt-2",
        "eos_token_id": special[config["eos_token"]],
    }
    template = {"tokenizer.chat_template": config["chat_template"]}
    return {"tokenizer.ggml.model": "gpt2"} | _keys(own | keys) | template


def _keys(keys: Mapping[str, Value | None]) -> dict[str, Value]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def llama_gguf(path: Path, tokenizer: Mapping[str, Value] | None = None, **more: Value) -> Path:
    """Write a Llama of one layer with weights of zeros. ``more`` has keys with __ for dots."""
    found = spm_metadata() if tokenizer is None else tokenizer
    tokens = found.get("tokenizer.ggml.tokens", ["a"])
    assert isinstance(tokens, list)
    shapes = {
        "token_embd": (len(tokens), WIDTH),
        "output_norm": (WIDTH,),
        **{f"blk.0.{name}_norm": (WIDTH,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")},
        "blk.0.ffn_down": (WIDTH, INNER),
    }
    tensors = [
        TensorSource(f"{name}.weight", shape, "F32" if len(shape) == 1 else "Q8_0", list)
        for name, shape in shapes.items()
    ]
    tensors = [
        TensorSource(each.name, each.shape, each.type, partial(_zeros, each.size))
        for each in tensors
    ]
    keys: dict[str, Value] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 256,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    more = {name.replace("__", "."): value for name, value in more.items()}
    write_gguf(path, keys | dict(found) | more, tensors)
    return path


def metadata_file(path: Path, metadata: Mapping[str, Value]) -> GGUFFile:
    """A file with metadata alone, as read."""
    write_gguf(path, metadata, [])
    return read_gguf(path)


def _zeros(size: int) -> list[bytes]:
    return [bytes(size)]
