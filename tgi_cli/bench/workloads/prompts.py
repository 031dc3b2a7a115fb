"""Texts of an exact number of tokens, made of words that are one token each."""

from __future__ import annotations

from random import Random

from tgi_cli.bench.settings import TokenCounter
from tgi_cli.errors import ConfigError

_ROUNDS = 100
"""Corrections of one text before it is left as near as it came."""


class PromptBuilder:
    """Makes texts of the tokenizer's own words.

    Args:
        tokenizer: counts them.
        special: count as a prompt, with what the tokenizer puts before and behind; False: as
            the text of a message.

    Attributes:
        least: tokens that a text has at least.
    """

    def __init__(self, tokenizer: TokenCounter, special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._words = list(tokenizer.words())
        self._overhead = self.count("")
        self.least = self._overhead + 1

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return self._tokenizer.count(text, self._special)

    def draw(self, dice: Random, words: int) -> list[str]:
        """So many words."""
        return dice.choices(self._words, k=words)

    def exact(self, dice: Random, length: int, prefix: str = "") -> tuple[str, int]:
        """A text of ``length`` tokens that begins with ``prefix``, and how many it really has.

        The two differ where the tokenizer is a guess, or where no text has that length.

        Raises:
            ConfigError: the prefix alone, or what the tokenizer adds, is longer.
        """
        begin = self.count(prefix) if prefix else self._overhead
        least = begin if prefix else self.least
        if length < least:
            raise ConfigError(
                f"a prompt of {length} tokens cannot be: it has {least} at least",
                "ask for longer prompts",
            )
        return self.fitted(dice, self.draw(dice, length - begin), length, prefix)

    def fitted(
        self, dice: Random, words: list[str], length: int, prefix: str = ""
    ) -> tuple[str, int]:
        """The prefix and the words, some at the end added, taken away or exchanged until the
        length is right; and the length."""
        words = list(words)
        best, best_count = "", 0
        for _ in range(_ROUNDS):
            text = " ".join([prefix, *words] if prefix else words)
            count = self.count(text)
            if not best or abs(count - length) < abs(best_count - length):
                best, best_count = text, count
            if count == length or not self._tokenizer.exact:
                break
            if count > length:  # words that came out as several tokens
                del words[-max(1, (count - length) // 2) :]
            else:
                words += self.draw(dice, max(1, (length - count) // 2))
        return best, best_count
