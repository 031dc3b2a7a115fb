"""Tokenizers of GGUF files: from metadata to the `tokenizers` library, without transformers.

The result is equal to llama.cpp's, for which docs/gguf.md has the figures, and to that of the
model's own tokenizer.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

import math
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

from tgi_cli import files
from tgi_cli.errors import CorruptFileError, UnsupportedModelError, no_panic
from tgi_cli.gguf.pre_tokenizers import PRE_TOKENIZATIONS, PreTokenization
from tgi_cli.gguf.reader import GGUFFile
from tgi_cli.gguf.special_tokens import (
    END_TEXTS,
    GGUFTokens,
    TokenType,
    no_tokenizer_error,
)

_SPACE = "\u2581"
"""The space in SentencePiece vocabularies."""

_KEEPS_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi-3 behind which spaces stay; all others take them."""


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a file.

    Raises:
        UnsupportedModelError: its metadata lack something without which ids would be wrong, or
            name a tokenizer that is not known.
        CorruptFileError: its metadata contradict each other.
    """
    complete = file.get("tokenizer.huggingface.json", str, "")
    tokens = GGUFTokens.read(file)
    model = file.get("tokenizer.ggml.model", str, "")
    try:
        with no_panic():
            if complete:
                files.check_tokenizer(complete.encode())
                return Tokenizer.from_str(complete)
            if model == "llama":
                tokenizer = _sentencepiece(file, tokens)
            elif model == "gpt2":
                tokenizer = _byte_level(file, tokens)
            elif model == "gemma4":
                tokenizer = _gemma4(file, tokens)
            else:
                raise no_tokenizer_error(
                    file, f"has a tokenizer of the kind {model!r:.40}, which is not supported"
                )
            _add_tokens(tokenizer, file, tokens)
            return tokenizer
    except (UnsupportedModelError, CorruptFileError):
        raise
    except Exception as error:  # the library raises bare Exception for any contradiction
        raise CorruptFileError(
            f"the tokenizer of {file.path} cannot be read: {' '.join(str(error).split())[:200]}",
            "use another conversion of the model, or name the original one by --tokenizer-name",
        ) from error


def tokenizer_config(file: GGUFFile) -> dict[str, str]:
    """The special tokens, as tokenizer_config.json has them.

    Raises:
        UnsupportedModelError, CorruptFileError: as :func:`read_tokenizer`.
    """
    tokens = GGUFTokens.read(file)
    named = {
        "bos_token": tokens.text(tokens.bos),
        "eos_token": tokens.text(tokens.eos),
        "unk_token": tokens.text(tokens.unknown),
        "pad_token": tokens.text(tokens.padding),
    }
    return {name: text for name, text in named.items() if text is not None}


def _byte_level(file: GGUFFile, tokens: GGUFTokens) -> Tokenizer:
    """Byte-level BPE, as of GPT-2 and most models since."""
    name = file.get("tokenizer.ggml.pre", str, "")
    pre = PRE_TOKENIZATIONS.get(name)
    if pre is None:
        what = f"has the unknown pre-tokenizer {name!r:.60}"
        if name in ("", "default"):
            what = "does not name its pre-tokenizer, as conversions before May 2024"
        raise no_tokenizer_error(file, what)
    model = models.BPE(
        vocab=_vocabulary(tokens),
        merges=_merges(file),
        ignore_merges=pre.ignores_merges,
        fuse_unk=False,
    )
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _set_post_processor(tokenizer, tokens, [processors.ByteLevel(trim_offsets=False)])
    return tokenizer


def make_pre_tokenizer(pre: PreTokenization) -> pre_tokenizers.PreTokenizer:
    """What splits a text into the parts that merges stay within."""
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if pre.falcon:
        steps = [
            pre_tokenizers.Punctuation("contiguous"),
            *steps,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    return pre_tokenizers.Sequence(steps)


_MOST_CHARACTERS_OF_CUTS = 1 << 28
"""Limit of the characters in all divisions of all tokens; published vocabularies have 1 << 25."""


def _sentencepiece(file: GGUFFile, tokens: GGUFTokens) -> Tokenizer:
    """SentencePiece's BPE, whose merges follow from the scores of what they make."""
    scores = file.values("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens.texts):
        raise no_tokenizer_error(file, "has no scores of tokens")
    if any(map(math.isnan, scores)):
        raise no_tokenizer_error(file, "has scores of tokens that are no numbers")
    normal = {
        text: score
        for text, score, kind in zip(tokens.texts, scores, tokens.types, strict=True)
        if kind == TokenType.NORMAL
    }
    if len(set(normal.values())) < 2:
        raise no_tokenizer_error(file, "has the same score for all tokens")
    if sum(len(text) ** 2 for text in normal) > _MOST_CHARACTERS_OF_CUTS:
        raise no_tokenizer_error(file, "has too many long tokens")
    ranked = [
        (-score, text[:cut], text[cut:])
        for text, score in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    ranked.sort(key=lambda merge: merge[0])
    model = models.BPE(
        vocab=_vocabulary(tokens),
        merges=[(left, right) for _, left, right in ranked],
        unk_token=tokens.text(tokens.unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    return _with_spaces(Tokenizer(model), tokens, prefix)


def _gemma4(file: GGUFFile, tokens: GGUFTokens) -> Tokenizer:
    """BPE with merges over the characters of a text, with bytes for unknown ones."""
    model = models.BPE(
        vocab=_vocabulary(tokens),
        merges=_merges(file),
        unk_token=tokens.text(tokens.unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, False)
    return _with_spaces(Tokenizer(model), tokens, prefix)


def _with_spaces(tokenizer: Tokenizer, tokens: GGUFTokens, prefix: bool) -> Tokenizer:
    """Add how spaces are written, one in front of a text included."""
    space = normalizers.Replace(" ", _SPACE)
    normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
    tokenizer.normalizer = normalizer
    steps: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    _set_post_processor(tokenizer, tokens, [])
    return tokenizer


def _vocabulary(tokens: GGUFTokens) -> dict[str, int]:
    return {text: index for index, text in enumerate(tokens.texts)}


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = []
    for line in file.values("tokenizer.ggml.merges", str):
        left, _, right = line[1:].partition(" ")  # the first character may be a space itself
        merges.append((line[:1] + left, right))
    if not merges:
        raise no_tokenizer_error(file, "has no merges")
    return merges


def _add_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: GGUFTokens) -> None:
    """Add the tokens that are cut out of a text before anything else."""
    name = file.get("general.name", str, "").lower()
    takes_spaces = "phi-3" in name or "phi3" in name
    added = []
    for index, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True)):
        ends = index in tokens.ends and (text in END_TEXTS or kind != TokenType.NORMAL)
        special = ends or kind in (TokenType.CONTROL, TokenType.UNKNOWN)
        if special or kind == TokenType.USER_DEFINED:
            strips = takes_spaces and special and text not in _KEEPS_SPACES
            added.append(AddedToken(text, special=special, normalized=False, rstrip=strips))
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(tokens.texts):
        raise CorruptFileError(
            f"{file.path} has tokens that cannot be told apart", "use another conversion"
        )


def _set_post_processor(tokenizer: Tokenizer, tokens: GGUFTokens, steps: list[Any]) -> None:
    """Add the tokens around a text, if there are any."""
    around: dict[str, int] = {}
    if tokens.adds_bos and tokens.bos is not None:
        around["BOS"] = tokens.bos
    if tokens.adds_eos and tokens.eos is not None:
        around["EOS"] = tokens.eos
    if around:
        begin, end = ["BOS"] * ("BOS" in around), ["EOS"] * ("EOS" in around)
        template = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *begin, "$B", *end],
            special_tokens=[
                {"id": name, "ids": [index], "tokens": [tokens.texts[index]]}
                for name, index in around.items()
            ],
        )
        steps = [*steps, template]
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)
