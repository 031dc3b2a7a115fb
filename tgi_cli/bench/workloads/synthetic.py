"""Made-up prompts: lengths from distributions, beginnings that several share."""

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
class Synthetic:
    """How made-up requests are.

    Attributes:
        prompt: tokens of each prompt, what the tokenizer adds to it included; behind the prefix.
        output: tokens to be generated.
        prefix_tokens: of each shared beginning.
        prefix_share: of the requests that have one, 0 to 1.
        prefixes: different ones; each request takes any of them.
        chat: prompts are messages of users.
    """

    prompt: Lengths
    output: Lengths
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    prefixes: int = 1
    chat: bool = False


def synthetic(tokenizer: TokenCounter, spec: Synthetic, seed: int = 0) -> Iterator[Request]:
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
    return _endless(builder, spec, shared, Random(f"synthetic {seed}"))


def _endless(
    builder: PromptBuilder, spec: Synthetic, shared: list[str], dice: Random
) -> Iterator[Request]:
    while True:
        length, prefix = spec.prompt.draw(dice), ""
        if shared and dice.random() < spec.prefix_share:
            prefix = dice.choice(shared)
            length += spec.prefix_tokens
        text, tokens = builder.exact(dice, length, prefix)
        yield Request(
            prompt=text,
            prompt_tokens=tokens,
            max_tokens=spec.output.draw(dice),
            messages=[{"role": "user", "content": text}] if spec.chat else None,
        )
