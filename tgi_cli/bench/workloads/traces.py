"""Traces of real servers, sent again: who asked when, and for how much.

Two forms of JSON lines are read:

- Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST25-release): ``timestamp`` in ms,
  ``input_length``, ``output_length`` and ``hash_ids``, one for every 512 tokens of the prompt.
  Equal ids stand for equal tokens behind equal beginnings; so prompts here are put together of
  blocks of words that depend on the id alone, and share what the traced ones shared.
- ours: ``at`` in seconds, ``prompt`` or ``messages``, ``max_tokens``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.files import lines_of, parsed
from tgi_cli.bench.workloads.synthetic import PromptBuilder
from tgi_cli.errors import ConfigError

BLOCK = 512
"""Tokens that one of Mooncake's ids stands for."""
_KEPT_BLOCKS = 4096


def trace(
    path: Path,
    tokenizer: TokenCounter,
    seed: int = 0,
    *,
    speed: float = 1.0,
    chat: bool = False,
    longest: int | None = None,
) -> Iterator[BenchRequest]:
    """The requests of a trace, each due when it was, counted from the first.

    Args:
        speed: 2 sends them in half the time.
        chat: prompts are messages of users.
        longest: leave out requests of more tokens, prompt and answer together.

    Raises:
        ConfigError: a file that cannot be read, or a line of neither form; it is named.
    """
    if not speed > 0:
        raise ConfigError(f"a trace cannot be replayed at speed {speed:g}", "give one above 0")
    rows = [(number, parsed(path, number, line)) for number, line in lines_of(path)]
    if not rows:
        raise ConfigError(f"{path} has no requests", "name a trace with one on each line")
    timed = sorted(((_time(path, number, row), row) for number, row in rows), key=lambda t: t[0])
    for number, row in rows:
        _check(path, number, row)
    return _replayed(timed, PromptBuilder(tokenizer, not chat), seed, speed, chat, longest)


def _replayed(
    timed: list[tuple[float, dict[str, Any]]],
    builder: PromptBuilder,
    seed: int,
    speed: float,
    chat: bool,
    longest: int | None,
) -> Iterator[BenchRequest]:
    blocks = _Blocks(builder, seed)
    begin = timed[0][0]
    for number, (time, row) in enumerate(timed):
        messages = row.get("messages")
        if "input_length" in row:
            output = max(1, row["output_length"])
            if longest is not None and row["input_length"] + output > longest:
                continue
            text, tokens = blocks.prompt(row["input_length"], row.get("hash_ids") or [], number)
        else:
            text = row.get("prompt") or "\n".join(m["content"] for m in messages or [])
            output, tokens = row["max_tokens"], builder.count(text)
            if longest is not None and tokens + output > longest:
                continue
        if messages is None and chat:
            messages = [{"role": "user", "content": text}]
        yield BenchRequest(
            prompt=text,
            prompt_tokens=tokens,
            max_tokens=output,
            at=(time - begin) / speed,
            messages=messages,
        )


class _Blocks:
    """Words of Mooncake's blocks."""

    def __init__(self, builder: PromptBuilder, seed: int) -> None:
        self._builder = builder
        self._seed = seed
        self._kept: OrderedDict[int, list[str]] = OrderedDict()

    def prompt(self, length: int, ids: list[int], number: int) -> tuple[str, int]:
        """A text of ``length`` tokens, made of the words of its blocks.

        What no id stands for is of this request (``number``) alone.
        """
        length = max(length, self._builder.least)
        # What the tokenizer puts in front counts too: the end gives up as many words for it.
        wanted = length - self._builder.least + 1
        words: list[str] = []
        for index in ids:
            words += self._block(index)
        dice = Random(f"rest {self._seed} {number}")
        words = words[:wanted] + self._builder.draw(dice, max(0, wanted - len(words)))
        return self._builder.fitted(dice, words, length)

    def _block(self, index: int) -> list[str]:
        words = self._kept.pop(index, None)
        if words is None:
            words = self._builder.draw(Random(f"block {self._seed} {index}"), BLOCK)
        self._kept[index] = words
        if len(self._kept) > _KEPT_BLOCKS:
            self._kept.popitem(last=False)
        return words


def _time(path: Path, number: int, row: dict[str, Any]) -> float:
    """Seconds at which a row's request came. Raises ConfigError."""
    for key, unit in (("timestamp", 1e-3), ("at", 1.0)):
        if key in row:
            if isinstance(row[key], int | float) and not isinstance(row[key], bool):
                return float(row[key]) * unit
            raise _wrong(path, number, f"{key} is no number")
    raise _wrong(path, number, "neither timestamp nor at")


def _check(path: Path, number: int, row: dict[str, Any]) -> None:
    """Raises ConfigError for a row of neither form."""
    if "input_length" in row:
        lengths = row["input_length"], row.get("output_length")
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise _wrong(path, number, "input_length and output_length must be whole numbers")
        ids = row.get("hash_ids") or []
        if not isinstance(ids, list) or not all(isinstance(index, int) for index in ids):
            raise _wrong(path, number, "hash_ids must be whole numbers")
        return
    messages = row.get("messages")
    texts = [m.get("content") if isinstance(m, dict) else None for m in messages or []]
    if not (
        isinstance(row.get("prompt"), str) or (texts and all(isinstance(t, str) for t in texts))
    ):
        raise _wrong(path, number, "neither input_length, prompt nor messages")
    if type(row.get("max_tokens")) is not int or row["max_tokens"] < 1:
        raise _wrong(path, number, "max_tokens must be a whole number above 0")


def _wrong(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"line {number} of {path}: {why}", "correct it, or take it out")
