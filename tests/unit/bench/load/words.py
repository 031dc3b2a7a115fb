"""A tokenizer of which all is known: a token for a word, and one in front of a prompt."""

from __future__ import annotations

from collections.abc import Sequence


class Words:
    """Counts words."""

    name = "words"
    exact = True

    def count(self, text: str, special: bool = True) -> int:
        return len(text.split()) + special

    def words(self) -> Sequence[str]:
        return ["red", "green", "blue", "white", "black"]
