"""Small tokenizers of translation models, as they are published."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
UNIGRAM, BPE = 1, 2

SOURCE_PIECES = {
    "\u2581the": -2.0,
    "\u2581": -3.0,
    "\u2581fox": -4.0,
    "es": -4.5,
    "fox": -5.0,
    "t": -6.0,
    "h": -6.0,
    "e": -6.0,
    "s": -6.0,
    "f": -6.5,
    "o": -6.5,
    "x": -6.5,
}
"""Scores of a unigram model."""


def spm(
    pieces: Mapping[str, float],
    model_type: int = UNIGRAM,
    adds_prefix: bool = True,
    removes_spaces: bool = True,
) -> bytes:
    """The file of a SentencePiece model, with the three special pieces that each has."""
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    data = b""
    for text, score in {**dict.fromkeys(kinds, 0.0), **pieces}.items():
        piece = _field(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        if text in kinds:
            piece += b"\x18" + bytes([kinds[text]])
        data += _field(1, piece)
    data += _field(2, b"\x18" + bytes([model_type]) + b"\x20\x80\x7d")
    normalizer = _field(1, b"identity") + b"\x18" + bytes([adds_prefix])
    return data + _field(3, normalizer + b"\x20" + bytes([removes_spaces]))


def _field(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def write_marian(folder: Path) -> dict[str, int]:
    """A model from English to languages with codes; returns its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.spm").write_bytes(spm(SOURCE_PIECES))
    (folder / "target.spm").write_bytes(spm({"\u2581Fuchs": -2.0, "\u2581die": -2.0}))
    names = ["</s>", "<unk>", ">>deu<<", ">>nld<<", *SOURCE_PIECES]
    names += ["\u2581Fuchs", "\u2581die", "\u2581thefox", "!", "<pad>"]
    ids = {name: index for index, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    config = {"source_lang": "en", "target_lang": "de", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<unk>"}))
    return ids


def write_m2m100(folder: Path, **config: object) -> dict[str, int]:
    """A model of a hundred languages; returns its vocabulary without these."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "s"]
    scores = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    (folder / "sentencepiece.bpe.model").write_bytes(spm(scores, BPE))
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
    ids = {name: index for index, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"} | config))
    return ids


def write_nllb(folder: Path, behind: bool = False) -> Tokenizer:
    """A tokenizer.json that puts the source language before a text, or behind its end."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["<s>", "<pad>", "</s>", "<unk>", *SOURCE_PIECES]
    backend = Tokenizer(models.Unigram([(name, SOURCE_PIECES.get(name, 0.0)) for name in names], 3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    codes = ["eng_Latn", "deu_Latn", "zho_Hans"]
    backend.add_special_tokens([AddedToken(name) for name in (*names[:4], *codes)])
    around = "$A </s> eng_Latn" if behind else "eng_Latn $A </s>"
    backend.post_processor = processors.TemplateProcessing(
        single=around,
        special_tokens=[(name, backend.token_to_id(name)) for name in ("eng_Latn", "</s>")],
    )
    backend.save(str(folder / "tokenizer.json"))
    return backend
