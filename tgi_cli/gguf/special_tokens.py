"""Special tokens of a GGUF file: their ids, and which of them begin or end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.pre_tokenizers import PRE_TOKENIZATIONS
from tgi_cli.gguf.reader import GGUFFile


class TokenType(IntEnum):
    """The type of a token (``tokenizer.ggml.token_type``), as in SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
        # Padding and separators of code models, which they write after a completion.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
"""Texts of tokens that end an answer, as llama.cpp knows them: files name only one to three."""

_LONGEST_TOKEN = 1 << 10
"""Limit of a token's characters; the longest of published vocabularies have 128."""

_END_KEYS = (
    *("eos_token_id", "eot_token_id", "eom_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"),
)


@dataclass(frozen=True, slots=True)
class GGUFTokens:
    """Special tokens of a vocabulary; ids are None where there is no such token.

    Attributes:
        texts: texts of all tokens, by id.
        types: :class:`TokenType` of all tokens.
        bos, eos, unknown, padding: ids.
        ends: ids of all tokens that end an answer, ``eos`` first.
        adds_bos, adds_eos: whether the token is added to a text.
    """

    texts: tuple[str, ...]
    types: tuple[int, ...]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: tuple[int, ...]
    adds_bos: bool
    adds_eos: bool

    @classmethod
    def read(cls, file: GGUFFile) -> GGUFTokens:
        """Read the tokens of a file.

        Raises:
            CorruptFileError: a key has another type than its own.
            UnsupportedModelError: keys are missing or contradict each other.
        """
        texts = tuple(
            text or f"[EMPTY_{number}]"
            for number, text in enumerate(file.values("tokenizer.ggml.tokens", str))
        )
        if not texts:
            raise no_tokenizer_error(file, "has no tokenizer")
        types = tuple(file.values("tokenizer.ggml.token_type", int))
        if len(types) != len(texts):
            what = f"has types of {len(types)} of its {len(texts)} tokens"
            raise no_tokenizer_error(file, what if types else "has no types of tokens")
        if len(set(texts)) != len(texts):
            raise no_tokenizer_error(file, "has a token twice")
        longest = max(map(len, texts))
        if longest > _LONGEST_TOKEN:
            raise no_tokenizer_error(file, f"has a token of {longest} characters")
        model = file.get("tokenizer.ggml.model", str, "")
        sentencepiece = model == "llama"
        bos = _id(file, "bos_token_id", len(texts), 1 if sentencepiece else None)
        eos = _id(file, "eos_token_id", len(texts), 2 if sentencepiece else None)
        pre = PRE_TOKENIZATIONS.get(file.get("tokenizer.ggml.pre", str, ""))
        by_default = sentencepiece or (pre is not None and pre.adds_bos)
        # Gemma 4's tokenizer adds it, and files of its first days say otherwise.
        always = model == "gemma4"
        return cls(
            texts=texts,
            types=types,
            bos=bos,
            eos=eos,
            unknown=_id(file, "unknown_token_id", len(texts), 0 if sentencepiece else None),
            padding=_id(file, "padding_token_id", len(texts)),
            ends=_ends(file, texts),
            adds_bos=always or file.get("tokenizer.ggml.add_bos_token", bool, by_default),
            adds_eos=file.get("tokenizer.ggml.add_eos_token", bool, False),
        )

    def text(self, index: int | None) -> str | None:
        """The text of a token."""
        return None if index is None else self.texts[index]


def no_tokenizer_error(file: GGUFFile, what: str) -> UnsupportedModelError:
    """The error for a file whose metadata make no tokenizer."""
    return UnsupportedModelError(
        f"{file.path} {what}",
        "name the original model by --tokenizer-name, or use a newer conversion",
    )


def _id(file: GGUFFile, key: str, size: int, default: int | None = None) -> int | None:
    found = file.get(f"tokenizer.ggml.{key}", int, -1)
    if 0 <= found < size:
        return found
    return default if default is not None and default < size else None


def _ends(file: GGUFFile, texts: Sequence[str]) -> tuple[int, ...]:
    """The ids of all tokens that end an answer, in the order of importance."""
    stated = [_id(file, key, len(texts)) for key in _END_KEYS]
    if stated[0] is None and file.get("tokenizer.ggml.model", str, "") == "llama":
        stated[0] = _id(file, "eos_token_id", len(texts), 2)
    by_text = {text: index for index, text in enumerate(texts) if text in END_TEXTS}
    found = dict.fromkeys([each for each in stated if each is not None] + [*by_text.values()])
    for without, marks in (
        # In these formats, messages end with the token, and answers may have several.
        ("<|end|>", ("<|return|>", "<|call|>")),
        ("<|end|>", ("<|flush|>", "<|calls|>")),
        # Here it is HTML.
        ("</s>", ("<|tool_response>",)),
    ):
        if all(mark in by_text for mark in marks) and by_text.get(without) in found:
            del found[by_text[without]]
    return tuple(found)
