"""Replay of traces of real servers.

Two formats of JSON lines are supported:

- Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST25-release): ``timestamp`` in ms,
  ``input_length``, ``output_length`` and ``hash_ids``, one for every 512 tokens of the prompt.
  Equal ids stand for equal tokens behind equal beginnings. So prompts are built from blocks of
  words that depend on the id alone, and share what the traced prompts shared.
- Our own: ``at`` in seconds, ``prompt`` or ``messages``, ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.files import line_error, lines_of, parsed
from tgi_cli.bench.workloads.synthetic import PromptBuilder, user_message
from tgi_cli.errors import ConfigError

BLOCK = 512
"""Tokens of a block of Mooncake's."""
_CACHED_BLOCKS = 4096


def trace(
    path: Path, tokenizer: TokenCounter, seed: int = 0, *, speed: float = 1.0, chat: bool = False
) -> Iterator[BenchRequest]:
    """Yield the requests of a trace, each with its time relative to the first.

    Args:
        speed: Factor of the replay; 2 takes half the time.
        chat: Send prompts as user messages.

    Raises:
        ConfigError: The file cannot be read, or a line has neither format.
    """
    if not speed > 0:
        raise ConfigError(f"a trace cannot be replayed at speed {speed:g}", "give one above 0")
    rows = [(number, parsed(path, number, line)) for number, line in lines_of(path)]
    if not rows:
        raise ConfigError(f"{path} has no requests", "name a trace with one on each line")
    for number, row in rows:
        _check(path, number, row)
    timed = sorted(((_time(path, number, row), row) for number, row in rows), key=lambda t: t[0])
    builder = PromptBuilder(tokenizer, not chat)

    @lru_cache(_CACHED_BLOCKS)
    def block(index: int) -> list[str]:
        return builder.draw(Random(f"block {seed} {index}"), BLOCK)

    def prompt(length: int, ids: list[int], number: int) -> tuple[str, int]:
        """Build a text from the words of its blocks; the words without an id are its own."""
        length = max(length, builder.least)
        # Special tokens count too: the end gives up as many words for them.
        wanted = length - builder.least + 1
        words = [word for index in ids for word in block(index)][:wanted]
        rng = Random(f"rest {seed} {number}")
        words += builder.draw(rng, wanted - len(words))
        return builder.fitted(rng, words, length)

    def requests() -> Iterator[BenchRequest]:
        for number, (time, row) in enumerate(timed):
            messages = row.get("messages")
            if "input_length" in row:
                text, tokens = prompt(row["input_length"], row.get("hash_ids") or [], number)
            else:
                text = row.get("prompt") or "\n".join(m["content"] for m in messages or [])
                tokens = builder.count(text)
            yield BenchRequest(
                prompt=text,
                prompt_tokens=tokens,
                max_tokens=max(1, row.get("output_length") or row.get("max_tokens") or 1),
                at=(time - timed[0][0]) / speed,
                messages=messages or (user_message(text) if chat else None),
            )

    return requests()


def _time(path: Path, number: int, row: dict[str, Any]) -> float:
    """Seconds at which the request of a row arrived. Raises ConfigError."""
    for key, unit in (("timestamp", 1e-3), ("at", 1.0)):
        if key in row:
            if isinstance(row[key], int | float) and not isinstance(row[key], bool):
                return float(row[key]) * unit
            raise line_error(path, number, f"{key} is not a number")
    raise line_error(path, number, "neither timestamp nor at")


def _check(path: Path, number: int, row: dict[str, Any]) -> None:
    """Raise ConfigError if a row has neither format."""
    if "input_length" in row:
        lengths = row["input_length"], row.get("output_length")
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise line_error(path, number, "input_length and output_length must be whole numbers")
        ids = row.get("hash_ids") or []
        if not isinstance(ids, list) or not all(isinstance(index, int) for index in ids):
            raise line_error(path, number, "hash_ids must be whole numbers")
        return
    messages = row.get("messages")
    texts = [m.get("content") if isinstance(m, dict) else None for m in messages or []]
    if not (
        isinstance(row.get("prompt"), str) or (texts and all(isinstance(t, str) for t in texts))
    ):
        raise line_error(path, number, "neither input_length, prompt nor messages")
    if type(row.get("max_tokens")) is not int or row["max_tokens"] < 1:
        raise line_error(path, number, "max_tokens must be a whole number above 0")
