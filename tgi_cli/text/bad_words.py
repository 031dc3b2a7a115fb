"""The token sequences that spell words."""

from __future__ import annotations

from collections.abc import Sequence

from tgi_cli.text.tokenizer import Tokenizer

_LINE = "\n"
"""What a word can follow without a space; no vocabulary joins it with a letter."""


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """How each word is tokenized at a text's start, behind a space and within a line, each once.

    Not every sequence that spells it: a model could still put it together from other pieces.
    One call of the tokenizer encodes all of them, and releases the interpreter lock meanwhile.
    """
    texts = [_LINE]
    for word in words:
        bare = word.lstrip(" ")
        texts += (bare, " " + bare, _LINE + bare)
    line, *encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    found: dict[tuple[int, ...], None] = {}
    for place, ids in enumerate(encoded):
        if place % 3 == 2:
            ids = ids[len(line) :] if ids[: len(line)] == line else []
        if ids:
            found[tuple(ids)] = None
    return tuple(found)
