"""Texts of an exact number of tokens, made of words that are one token each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.distributions import LengthDistribution
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


@dataclass(frozen=True, kw_only=True)
class SyntheticWorkload:
    """How made-up requests are.

    Attributes:
        prompt: tokens of each prompt, what the tokenizer adds to it included; behind the prefix.
        output: tokens to be generated.
        prefix_tokens: of each shared beginning.
        prefix_share: of the requests that have one, 0 to 1.
        prefixes: different ones; each request takes any of them.
        chat: prompts are messages of users.
    """

    prompt: LengthDistribution
    output: LengthDistribution
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    prefixes: int = 1
    chat: bool = False


def synthetic(
    tokenizer: TokenCounter, spec: SyntheticWorkload, seed: int = 0
) -> Iterator[BenchRequest]:
    """Requests without end.

    Raises:
        ConfigError: lengths that no prompt can have, or a share or number of prefixes that cannot
            be.
    """
    if not 0 <= spec.prefix_share <= 1 or spec.prefixes < 1 or spec.prefix_tokens < 0:
        raise ConfigError(
            "shared prefixes need a share from 0 to 1, one prefix or more, and a length of 0 or "
            "more",
            "correct the options that say so",
        )
    builder = PromptBuilder(tokenizer, special=not spec.chat)
    shared = [
        builder.exact(Random(f"prefix {seed} {number}"), spec.prefix_tokens)[0]
        for number in range(spec.prefixes if spec.prefix_tokens and spec.prefix_share else 0)
    ]
    return _prompts(builder, spec, shared, Random(f"synthetic {seed}"))


def _prompts(
    builder: PromptBuilder, spec: SyntheticWorkload, shared: list[str], dice: Random
) -> Iterator[BenchRequest]:
    while True:
        length, prefix = spec.prompt.draw(dice), ""
        if shared and dice.random() < spec.prefix_share:
            prefix = dice.choice(shared)
            length += spec.prefix_tokens
        text, tokens = builder.exact(dice, length, prefix)
        yield BenchRequest(
            prompt=text,
            prompt_tokens=tokens,
            max_tokens=spec.output.draw(dice),
            messages=[{"role": "user", "content": text}] if spec.chat else None,
        )


@dataclass(frozen=True, kw_only=True)
class ConversationWorkload:
    """How conversations are.

    Attributes:
        turns: of each.
        first, turn: tokens of a user's first turn, and of each later one.
        output: tokens of each answer.
        think: seconds between an answer and the next turn, in the mean; exponential.
        system_tokens: of a system message that all have in common; 0: none.
        chat: turns are messages; else plain text, sent behind all that was said before.
    """

    turns: LengthDistribution
    first: LengthDistribution
    turn: LengthDistribution
    output: LengthDistribution
    think: float = 0.0
    system_tokens: int = 0
    chat: bool = True


def conversations(
    tokenizer: TokenCounter, spec: ConversationWorkload, seed: int = 0
) -> Iterator[BenchRequest]:
    """Turns without end, one conversation after the other.

    Each request has the new turn alone; who sends it puts what was said before in front.

    Raises:
        ConfigError: lengths that no turn can have, or a negative time to think.
    """
    if spec.think < 0:
        raise ConfigError("nobody thinks for less than 0 seconds", "give a longer time")
    builder = PromptBuilder(tokenizer, special=False)
    system = ""
    if spec.system_tokens:
        system, _ = builder.exact(Random(f"system {seed}"), spec.system_tokens)
    return _turns(builder, spec, system, seed)


def _turns(
    builder: PromptBuilder, spec: ConversationWorkload, system: str, seed: int
) -> Iterator[BenchRequest]:
    number = 0
    while True:
        dice = Random(f"conversation {seed} {number}")
        for turn in range(spec.turns.draw(dice)):
            length = (spec.turn if turn else spec.first).draw(dice)
            text, tokens = builder.exact(dice, length)
            messages = [{"role": "user", "content": text}]
            if system and not turn:
                messages.insert(0, {"role": "system", "content": system})
                tokens += spec.system_tokens
                text = text if spec.chat else f"{system}\n{text}"
            yield BenchRequest(
                prompt=text,
                prompt_tokens=tokens,
                max_tokens=spec.output.draw(dice),
                messages=messages if spec.chat else None,
                conversation=number,
                think=dice.expovariate(1 / spec.think) if turn and spec.think else 0.0,
            )
        number += 1
