"""The token sequences that spell a word."""

from __future__ import annotations

from tgi_cli.text.tokenizer import Tokenizer

_LINE = "\n"
"""What a word can follow without a space; no vocabulary joins it with a letter."""


def word_ids(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """How ``word`` is tokenized at a text's start, behind a space and within a line, each once.

    Not every sequence that spells it: a model could still put it together from other pieces.
    """
    word = word.lstrip(" ")
    line = tokenizer.encode(_LINE, add_special_tokens=False)
    within = tokenizer.encode(_LINE + word, add_special_tokens=False)
    found = [
        tokenizer.encode(word, add_special_tokens=False),
        tokenizer.encode(" " + word, add_special_tokens=False),
        within[len(line) :] if within[: len(line)] == line else [],
    ]
    return list(dict.fromkeys(tuple(ids) for ids in found if ids))
