"""Prompts from files: one per line, JSON lines, conversations of ShareGPT, traces of servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.distributions import LengthDistribution
from tgi_cli.bench.workloads.synthetic import PromptBuilder, user_message
from tgi_cli.errors import ConfigError
from tgi_cli.files import WORKLOAD_BYTES, decode_json, read_bytes

BLOCK = 512
"""Tokens of a block of a trace of Mooncake's."""
_CACHED_BLOCKS = 4096
_PROMPT_KEYS = ("prompt", "text", "inputs", "question")
_LENGTH_KEYS = ("max_tokens", "output_tokens", "max_new_tokens")
_USERS = {"human", "user"}
_ASSISTANTS = {"gpt", "assistant", "chatgpt", "bing", "bard"}


class FilePrompt(NamedTuple):
    """A prompt of a file, with its own messages and length if it has them."""

    text: str
    messages: list[dict[str, str]] | None = None
    max_tokens: int | None = None


def file_prompts(
    path: Path,
    tokenizer: TokenCounter,
    output: LengthDistribution,
    seed: int = 0,
    *,
    chat: bool = False,
) -> Iterator[BenchRequest]:
    """Yield the prompts of a file without end, shuffled again in each round.

    A ``.txt`` file has a prompt per line, a ``.jsonl`` file an object per line with ``prompt``
    (``text``, ``inputs``) or ``messages``, and optionally ``max_tokens``, which takes precedence
    over ``output``. Empty lines are skipped.

    Args:
        chat: Send plain prompts as user messages.

    Raises:
        ConfigError: The file cannot be read or is empty, or a line is invalid.
    """
    rows = [_row(path, *line) for line in _lines(path)]
    if not rows:
        raise ConfigError(f"{path} has no prompts", "write one on each line")
    rng = Random(f"file {seed}")

    def requests() -> Iterator[BenchRequest]:
        while True:
            for row in rng.sample(rows, len(rows)):
                messages = row.messages or (user_message(row.text) if chat else None)
                yield BenchRequest(
                    prompt=row.text,
                    prompt_tokens=tokenizer.count(row.text, special=messages is None),
                    max_tokens=row.max_tokens or output.draw(rng),
                    messages=messages,
                )

    return requests()


def _row(path: Path, number: int, line: str) -> FilePrompt:
    if path.suffix not in (".jsonl", ".ndjson"):
        return FilePrompt(line)
    value = _parsed(path, number, line)
    length = next((value[key] for key in _LENGTH_KEYS if key in value), None)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise _line_error(path, number, "max_tokens is not a whole number above 0")
    messages = value.get("messages")
    if messages is not None:
        if not messages or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role")
            for m in messages
        ):
            raise _line_error(path, number, "each message needs a role and a text")
        turns = [{"role": str(m["role"]), "content": m["content"]} for m in messages]
        return FilePrompt("\n".join(turn["content"] for turn in turns), turns, length)
    prompt = next((value[key] for key in _PROMPT_KEYS if key in value), None)
    if not isinstance(prompt, str) or not prompt:
        raise _line_error(path, number, f"no text under {', '.join(_PROMPT_KEYS)} or messages")
    return FilePrompt(prompt, None, length)


@dataclass(frozen=True, kw_only=True)
class ShareGptWorkload:
    """How the conversations of a file are sent.

    Attributes:
        output: Tokens to generate, or None for as many as the response in the file has.
        turns: Maximum turns of each conversation. Later turns follow the responses to the earlier
            ones, after ``think`` seconds.
        chat: Send turns as messages.
    """

    output: LengthDistribution | None = None
    turns: int = 1
    think: float = 0.0
    chat: bool = True


def sharegpt(
    path: Path, tokenizer: TokenCounter, spec: ShareGptWorkload, seed: int = 0
) -> Iterator[BenchRequest]:
    """Yield the user turns of a JSON file of conversations without end, in random order.

    The format is ShareGPT's: ``[{"conversations": [{"from": "human", "value": ...}, {"from":
    "gpt", "value": ...}]}]``, or ``messages`` with ``role`` and ``content``.

    Raises:
        ConfigError: The file cannot be read, or has no such conversation.
    """
    try:
        content = decode_json(read_bytes(path, WORKLOAD_BYTES), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "name a JSON file") from error
    items = content if isinstance(content, list) else []
    found = [pairs for item in items if (pairs := _pairs(item))]
    if not found:
        raise ConfigError(
            f"{path} has no conversation with a response to a user",
            'write [{"conversations": [{"from": "human", "value": "..."}, '
            '{"from": "gpt", "value": "..."}]}]',
        )
    rng = Random(f"sharegpt {seed}")

    def requests() -> Iterator[BenchRequest]:
        number = 0
        while True:
            for pairs in rng.sample(found, len(found)):
                for turn, (prompt, response) in enumerate(pairs[: spec.turns]):
                    tokens = tokenizer.count(prompt, special=not spec.chat)
                    output = spec.output
                    length = output.draw(rng) if output else tokenizer.count(response, False)
                    yield BenchRequest(
                        prompt=prompt,
                        prompt_tokens=tokens,
                        max_tokens=max(1, length),
                        messages=user_message(prompt) if spec.chat else None,
                        conversation=number if spec.turns > 1 else None,
                        think=spec.think if turn else 0.0,
                    )
                number += 1

    return requests()


def _pairs(item: Any) -> list[tuple[str, str]]:
    """The user turns and responses of one conversation, as long as they alternate."""
    if not isinstance(item, dict):
        return []
    rows = item.get("conversations") or item.get("conversation") or item.get("messages")
    if not isinstance(rows, list):
        return []
    turns = [
        (str(row.get("from", row.get("role", ""))), row.get("value", row.get("content")))
        for row in rows
        if isinstance(row, dict)
    ]
    turns = [turn for turn in turns if turn[0] != "system"]
    pairs = []
    for (user, prompt), (assistant, response) in zip(turns[::2], turns[1::2], strict=False):
        if user not in _USERS or assistant not in _ASSISTANTS:
            break
        if not isinstance(prompt, str) or not isinstance(response, str) or not prompt:
            break
        pairs.append((prompt, response))
    return pairs


def trace(
    path: Path, tokenizer: TokenCounter, seed: int = 0, *, speed: float = 1.0, chat: bool = False
) -> Iterator[BenchRequest]:
    """Yield the requests of a trace, each with its time relative to the first.

    Two formats of JSON lines are supported:

    - Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST25-release): ``timestamp`` in ms,
      ``input_length``, ``output_length`` and ``hash_ids``, one for every 512 tokens of the prompt.
      Equal ids stand for equal tokens after equal beginnings. So prompts are built from blocks of
      words that depend on the id alone, and share what the traced prompts shared.
    - Our own: ``at`` in seconds, ``prompt`` or ``messages``, ``max_tokens``.

    Args:
        speed: Factor of the replay; 2 takes half the time.
        chat: Send prompts as user messages.

    Raises:
        ConfigError: The file cannot be read, or a line has neither format.
    """
    if not speed > 0:
        raise ConfigError(f"a trace cannot be replayed at speed {speed:g}", "give one above 0")
    timed = [_timed(path, *line) for line in _lines(path)]
    if not timed:
        raise ConfigError(f"{path} has no requests", "name a trace with one on each line")
    timed.sort(key=lambda pair: pair[0])
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


def _timed(path: Path, number: int, line: str) -> tuple[float, dict[str, Any]]:
    """A request of a trace, and the seconds at which it arrived. Raises ConfigError."""
    row = _parsed(path, number, line)
    if "input_length" in row:
        lengths, ids = (row["input_length"], row.get("output_length")), row.get("hash_ids") or []
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise _line_error(path, number, "input_length and output_length must be whole numbers")
        if not isinstance(ids, list) or not all(isinstance(index, int) for index in ids):
            raise _line_error(path, number, "hash_ids must be whole numbers")
    else:
        messages = row.get("messages") or [{"content": row.get("prompt")}]
        texts = [m.get("content") if isinstance(m, dict) else None for m in messages]
        if not isinstance(row.get("prompt"), str) and not all(isinstance(t, str) for t in texts):
            raise _line_error(path, number, "neither input_length, prompt nor messages")
        if type(row.get("max_tokens")) is not int or row["max_tokens"] < 1:
            raise _line_error(path, number, "max_tokens must be a whole number above 0")
    key = "timestamp" if "timestamp" in row else "at"
    if key not in row:
        raise _line_error(path, number, "neither timestamp nor at")
    if not isinstance(row[key], int | float) or isinstance(row[key], bool):
        raise _line_error(path, number, f"{key} is not a number")
    return row[key] * (1e-3 if key == "timestamp" else 1.0), row


def _lines(path: Path) -> list[tuple[int, str]]:
    """The numbers and texts of the lines that are not empty. Raises ConfigError."""
    try:
        text = read_bytes(path, WORKLOAD_BYTES, pipes=True).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "name a text file") from error
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises ConfigError."""
    try:
        value = decode_json(line.encode())
    except ValueError as error:
        raise _line_error(path, number, str(error)) from error
    if not isinstance(value, dict):
        raise _line_error(path, number, "not a JSON object")
    return value


def _line_error(path: Path, number: int, cause: str) -> ConfigError:
    """The error of an invalid line."""
    return ConfigError(f"line {number} of {path}: {cause}", "correct or remove the line")
