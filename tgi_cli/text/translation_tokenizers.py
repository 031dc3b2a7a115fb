"""Tokenizers of Marian and M2M100, which are published without a ``tokenizer.json``.

A SentencePiece model cuts a text into pieces, and a vocabulary of its own (``vocab.json``) has the
ids of the pieces of both languages. Both become one tokenizer of the `tokenizers` library, so that
neither transformers nor SentencePiece is needed.

Formats: https://huggingface.co/docs/transformers/model_doc/marian and
https://huggingface.co/docs/transformers/model_doc/m2m_100
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tgi_cli.errors import ModelError, no_panic
from tgi_cli.files import CONFIG_BYTES, read_json
from tgi_cli.text.sentencepiece_file import ModelType, PieceType, SentencePieceFile

_SPACE = "\u2581"
"""The space in SentencePiece vocabularies."""

_TARGET_ONLY = "\uffff"
"""Follows pieces in the tokenizer that the source language's model does not have, so that no text
is encoded with them. It is a noncharacter of Unicode, and removed from texts."""

_UNKNOWN_PENALTY = 10.0
"""How much less probable than its least probable piece SentencePiece takes an unknown character."""

_END, _UNKNOWN = "</s>", "<unk>"

_M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms "
    "my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur "
    "uz vi wo xh yi yo zh zu"
)
_WMT21 = "en ha is ja cs ru zh de"
_LANGUAGES = {"m2m100": _M2M100.split(" "), "wmt21": _WMT21.split(" ")}
"""Codes by ``language_codes``, in the order of their ids, which follow those of the vocabulary."""

_SOURCE = "en"
"""Source language of M2M100 where ``tokenizer_config.json`` names none."""


def translation_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a folder with the files of Marian or M2M100; None for any other.

    Characters that the source's pieces lack and the vocabulary has are taken one by one;
    transformers takes a run of them as one unknown token.

    Args:
        folder: folder of the model.
        config: its ``tokenizer_config.json``.

    Raises:
        ModelError: a file cannot be read, the two vocabularies of a pair of languages are apart,
            or the languages are not known.
    """
    vocabulary = folder / "vocab.json"
    if not vocabulary.is_file():
        return None
    if (folder / "source.spm").is_file():
        if config.get("separate_vocabs"):
            raise ModelError(
                f"the tokenizer of {folder} has a vocabulary for each language, which is not "
                "supported",
                "put the model's tokenizer.json into the folder",
            )
        ids = _read_ids(vocabulary)
        codes = [piece for piece in ids if piece.startswith(">>") and piece.endswith("<<")]
        return _read_backend(folder / "source.spm", ids, ["<pad>", *codes])
    if (folder / "sentencepiece.bpe.model").is_file():
        ids = _read_ids(vocabulary)
        stated = str(config.get("language_codes", "m2m100"))
        if stated not in _LANGUAGES:
            raise ModelError(f"the languages {stated!r} of {folder}'s tokenizer are not known")
        tokens = [f"__{code}__" for code in _LANGUAGES[stated]]
        ids |= {token: len(ids) + index for index, token in enumerate(tokens)}
        source = f"__{config.get('src_lang') or _SOURCE}__"
        if source not in tokens:
            raise ModelError(f"{folder}'s tokenizer_config.json names no language as 'src_lang'")
        return _read_backend(
            folder / "sentencepiece.bpe.model", ids, ["<s>", "<pad>", *tokens], source
        )
    return None


def _read_ids(path: Path) -> dict[str, int]:
    """The ids of a vocabulary, which are 0 and up."""
    try:
        ids = read_json(path, CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "download the model again") from error
    if (
        not isinstance(ids, dict)
        or {_END, _UNKNOWN} - ids.keys()
        or not all(type(index) is int and 0 <= index < 2 * len(ids) for index in ids.values())
        or len(set(ids.values())) < len(ids)
    ):
        raise ModelError(f"{path} is no vocabulary with </s> and <unk>", "download the model again")
    return ids


def _read_backend(
    path: Path, ids: Mapping[str, int], specials: Sequence[str], source: str | None = None
) -> Tokenizer:
    model = SentencePieceFile.read(path)
    try:
        with no_panic():
            return _build(model, ids, specials, source)
    except Exception as error:  # the library raises bare Exception for invalid rules and pieces
        raise ModelError(f"{path} cannot be used: {error}", "download the model again") from error


def _build(
    model: SentencePieceFile, ids: Mapping[str, int], specials: Sequence[str], source: str | None
) -> Tokenizer:
    """A tokenizer with these ids; ``source`` precedes each text, the end token follows it."""
    specials = [_UNKNOWN, _END, *(token for token in specials if token in ids)]
    scores = {
        piece.text: piece.score
        for piece in model.pieces
        if piece.type in (PieceType.NORMAL, PieceType.USER_DEFINED) and piece.text in ids
    }
    encoded = scores.keys() | set(specials)
    names = {
        piece if piece in encoded or len(piece) == 1 else piece + _TARGET_ONLY: index
        for piece, index in ids.items()
    }
    if model.model_type == ModelType.UNIGRAM:
        kind: models.Model = _unigram(scores, names)
    elif model.model_type == ModelType.BPE:
        kind = models.BPE(names, _merges(scores), unk_token=_UNKNOWN, fuse_unk=True)
    else:
        raise ValueError("it is a model of words or characters alone")
    tokenizer = Tokenizer(kind)
    rules: list[normalizers.Normalizer] = [normalizers.Replace(_TARGET_ONLY, "")]
    if model.charsmap:
        rules.insert(0, normalizers.Precompiled(model.charsmap))
    if model.removes_spaces:
        rules += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(rules)
    scheme = "always" if model.adds_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_TARGET_ONLY, ""),
            decoders.Metaspace(_SPACE, prepend_scheme=scheme),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    around = [source, _END] if source is not None else [_END]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{'' if source is None else f'{source} '}$A {_END}",
        special_tokens=[(token, ids[token]) for token in around],
    )
    return tokenizer


def _unigram(scores: Mapping[str, float], names: Mapping[str, int]) -> models.Unigram:
    """A unigram model: a text is cut where the sum of the pieces' scores is largest."""
    least = min(scores.values(), default=0.0) - _UNKNOWN_PENALTY
    entries = [(f"{_TARGET_ONLY}{index}", least) for index in range(max(names.values()) + 1)]
    for piece, index in names.items():
        entries[index] = (piece, scores.get(piece, least))
    return models.Unigram(entries, unk_id=names[_UNKNOWN])


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make up a piece, those of the highest score first."""
    ordered = sorted(scores, key=lambda piece: -scores[piece])  # equal ones as they are stored
    return [
        (piece[:cut], piece[cut:])
        for piece in ordered
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
