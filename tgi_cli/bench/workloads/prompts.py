"""Texts of an exact number of tokens, made of words that are one token each."""

from __future__ import annotations

from random import Random

from tgi_cli.bench.settings import TokenCounter
from tgi_cli.errors import ConfigError

_ROUNDS = 24
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
        if length < max(begin, self.least):
            raise ConfigError(
                f"a prompt of {length} tokens cannot be: it has {max(begin, self.least)} at least",
                "give longer prompts",
            )
        words = self.draw(dice, length - begin)
        best = self._fitted(dice, words, length, prefix)
        return best, self.count(best)

    def _fitted(self, dice: Random, words: list[str], length: int, prefix: str) -> str:
        """Words added, taken away or exchanged at the end until the length is right."""
        best, best_error = "", length + 1
        for _ in range(_ROUNDS):
            text = joined(prefix, words)
            error = self.count(text) - length
            if abs(error) < best_error:
                best, best_error = text, abs(error)
            if error == 0 or not self._tokenizer.exact:
                break
            if error > 0:
                # Words that came out as several tokens: a half of them away at first, then one.
                del words[-max(1, error // 2) :]
            else:
                words += self.draw(dice, max(1, -error // 2))
        return best


def joined(prefix: str, words: list[str]) -> str:
    """The prefix and the words, with one space between any two."""
    return " ".join([prefix, *words] if prefix else words)
