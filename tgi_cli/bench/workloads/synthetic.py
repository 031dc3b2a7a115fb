"""Synthetic prompts and conversations, from words that are one token each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.plan import SharedPrefix
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.distributions import LengthDistribution
from tgi_cli.errors import ConfigError

_ROUNDS = 100
"""Corrections of one text, after which the nearest length is taken."""


def user_message(text: str) -> list[dict[str, str]]:
    """The messages of a chat of one turn."""
    return [{"role": "user", "content": text}]


class PromptBuilder:
    """Builds texts of a given number of tokens from words of the tokenizer.

    Args:
        tokenizer: Counts the tokens.
        special: Whether texts are prompts, with the tokenizer's special tokens, or messages.

    Attributes:
        least: The fewest tokens that a text can have.
    """

    def __init__(self, tokenizer: TokenCounter, special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._words = list(tokenizer.words())
        self._overhead = self.count("")
        self.least = self._overhead + 1

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return self._tokenizer.count(text, self._special)

    def draw(self, rng: Random, words: int) -> list[str]:
        """Draw words at random."""
        return rng.choices(self._words, k=words)

    def exact(self, rng: Random, length: int, prefix: str = "") -> tuple[str, int]:
        """Build a text of ``length`` tokens that begins with ``prefix``; return it and its length.

        The actual length differs if the tokenizer is an estimate or no text has that length.

        Raises:
            ConfigError: The prefix and the special tokens alone are longer.
        """
        begin = self.count(prefix) if prefix else self._overhead
        least = begin if prefix else self.least
        if length < least:
            raise ConfigError(
                f"a prompt cannot have {length} tokens: the minimum is {least}",
                "ask for longer prompts",
            )
        return self.fitted(rng, self.draw(rng, length - begin), length, prefix)

    def fitted(
        self, rng: Random, words: list[str], length: int, prefix: str = ""
    ) -> tuple[str, int]:
        """Join the prefix and the words, and add or drop words until the length is right."""
        words = list(words)
        best, best_count = "", 0
        for _ in range(_ROUNDS):
            text = " ".join([prefix, *words] if prefix else words)
            count = self.count(text)
            if not best or abs(count - length) < abs(best_count - length):
                best, best_count = text, count
            if count == length or not self._tokenizer.exact:
                break
            if count > length:  # some words are several tokens
                del words[-max(1, (count - length) // 2) :]
            else:
                words += self.draw(rng, max(1, (length - count) // 2))
        return best, best_count


@dataclass(frozen=True)
class SyntheticWorkload:
    """Synthetic requests.

    Attributes:
        prompt: Tokens of each prompt with its special tokens, without the prefix.
        output: Tokens to generate.
        prefix: Beginnings that prompts share.
        chat: Send prompts as user messages.
    """

    prompt: LengthDistribution
    output: LengthDistribution
    prefix: SharedPrefix | None = None
    chat: bool = False


def synthetic(
    tokenizer: TokenCounter, spec: SyntheticWorkload, seed: int = 0
) -> Iterator[BenchRequest]:
    """Yield requests without end. Raises ConfigError for lengths that no prompt can have."""
    builder = PromptBuilder(tokenizer, special=not spec.chat)
    prefix = spec.prefix or SharedPrefix(0, count=0)
    shared = [
        builder.exact(Random(f"prefix {seed} {number}"), prefix.tokens)[0]
        for number in range(prefix.count)
    ]
    rng = Random(f"synthetic {seed}")

    def requests() -> Iterator[BenchRequest]:
        while True:
            length, beginning = spec.prompt.draw(rng), ""
            if shared and rng.random() < prefix.share:
                beginning = rng.choice(shared)
                length += prefix.tokens
            text, tokens = builder.exact(rng, length, beginning)
            yield BenchRequest(
                prompt=text,
                prompt_tokens=tokens,
                max_tokens=spec.output.draw(rng),
                messages=user_message(text) if spec.chat else None,
            )

    return requests()


@dataclass(frozen=True, kw_only=True)
class ConversationWorkload:
    """Synthetic conversations.

    Attributes:
        turns: Turns of each conversation.
        first, turn: Tokens of the first user turn, and of each later one.
        output: Tokens of each response.
        think: Mean seconds between a response and the next turn, exponentially distributed.
        system_tokens: Length of a system message that all conversations share, or 0 for none.
        chat: Send turns as messages; otherwise as plain text after the conversation so far.
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
    """Yield turns without end, one conversation after another.

    Each request has the new turn only; its sender prepends the conversation so far.

    Raises:
        ConfigError: Lengths that no turn can have, or a negative time to think.
    """
    if spec.think < 0:
        raise ConfigError("the time to think is below 0 seconds", "give 0 or more")
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
        rng = Random(f"conversation {seed} {number}")
        for turn in range(spec.turns.draw(rng)):
            length = (spec.turn if turn else spec.first).draw(rng)
            text, tokens = builder.exact(rng, length)
            messages = user_message(text)
            if system and not turn:
                messages.insert(0, {"role": "system", "content": system})
                tokens += spec.system_tokens
                text = text if spec.chat else f"{system}\n{text}"
            yield BenchRequest(
                prompt=text,
                prompt_tokens=tokens,
                max_tokens=spec.output.draw(rng),
                messages=messages if spec.chat else None,
                conversation=number,
                think=rng.expovariate(1 / spec.think) if turn and spec.think else 0.0,
            )
        number += 1
