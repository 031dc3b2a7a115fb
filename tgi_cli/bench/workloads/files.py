"""Prompts from files: one per line, JSON lines, or conversations in ShareGPT's format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.distributions import LengthDistribution
from tgi_cli.bench.workloads.synthetic import user_message
from tgi_cli.errors import ConfigError
from tgi_cli.files import WORKLOAD_BYTES, decode_json, read_bytes

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
    """Yield the prompts of a file without end, shuffled anew in each round.

    A ``.txt`` file has a prompt per line, a ``.jsonl`` file an object per line with ``prompt``
    (``text``, ``inputs``) or ``messages``, and optionally ``max_tokens``, which takes precedence
    over ``output``. Empty lines are skipped.

    Args:
        chat: Send plain prompts as user messages.

    Raises:
        ConfigError: The file cannot be read or is empty, or a line is invalid.
    """
    rows = [_row(path, *line) for line in lines_of(path)]
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
    value = parsed(path, number, line)
    length = next((value[key] for key in _LENGTH_KEYS if key in value), None)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise line_error(path, number, "max_tokens is not a whole number above 0")
    messages = value.get("messages")
    if messages is not None:
        if not messages or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role")
            for m in messages
        ):
            raise line_error(path, number, "each message needs a role and a text")
        turns = [{"role": str(m["role"]), "content": m["content"]} for m in messages]
        return FilePrompt("\n".join(turn["content"] for turn in turns), turns, length)
    prompt = next((value[key] for key in _PROMPT_KEYS if key in value), None)
    if not isinstance(prompt, str) or not prompt:
        raise line_error(path, number, f"no text under {', '.join(_PROMPT_KEYS)} or messages")
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


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The numbers and texts of the lines that are not empty. Raises ConfigError."""
    try:
        text = read_bytes(path, WORKLOAD_BYTES, pipes=True).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "name a text file") from error
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises ConfigError."""
    try:
        value = decode_json(line.encode())
    except ValueError as error:
        raise line_error(path, number, str(error)) from error
    if not isinstance(value, dict):
        raise line_error(path, number, "not a JSON object")
    return value


def line_error(path: Path, number: int, cause: str) -> ConfigError:
    """The error of an invalid line."""
    return ConfigError(f"line {number} of {path}: {cause}", "correct or remove the line")
