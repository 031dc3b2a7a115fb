"""Made-up conversations: turns that follow the answers before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tgi_cli.bench.events import Request
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.lengths import Lengths
from tgi_cli.bench.workloads.prompts import PromptBuilder
from tgi_cli.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """How conversations are.

    Attributes:
        turns: of each.
        first, turn: tokens of a user's first turn, and of each later one.
        output: tokens of each answer.
        think: seconds between an answer and the next turn, in the mean; exponential.
        system_tokens: of a system message that all have in common; 0: none.
        chat: turns are messages; else plain text, sent behind all that was said before.
    """

    turns: Lengths
    first: Lengths
    turn: Lengths
    output: Lengths
    think: float = 0.0
    system_tokens: int = 0
    chat: bool = True


def conversations(tokenizer: TokenCounter, spec: Conversations, seed: int = 0) -> Iterator[Request]:
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
    return _endless(builder, spec, system, seed)


def _endless(
    builder: PromptBuilder, spec: Conversations, system: str, seed: int
) -> Iterator[Request]:
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
            yield Request(
                prompt=text,
                prompt_tokens=tokens,
                max_tokens=spec.output.draw(dice),
                messages=messages if spec.chat else None,
                conversation=number,
                think=dice.expovariate(1 / spec.think) if turn and spec.think else 0.0,
            )
        number += 1
