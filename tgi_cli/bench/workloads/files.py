"""Prompts of files: a line each, JSON lines, or conversations in ShareGPT's form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.bench.workloads.distributions import LengthDistribution
from tgi_cli.errors import ConfigError
from tgi_cli.files import WORKLOAD_BYTES, decode_json, read_bytes

_PROMPT_KEYS = ("prompt", "text", "inputs", "question")
_LENGTH_KEYS = ("max_tokens", "output_tokens", "max_new_tokens")
_USERS = {"human", "user"}
_ASSISTANTS = {"gpt", "assistant", "chatgpt", "bing", "bard"}


def file_prompts(
    path: Path,
    tokenizer: TokenCounter,
    output: LengthDistribution,
    seed: int = 0,
    *,
    chat: bool = False,
    shuffle: bool = False,
    repeat: bool = True,
) -> Iterator[BenchRequest]:
    """A prompt per line of a ``.txt`` file, or per object of a ``.jsonl`` file.

    Objects have ``prompt`` (``text``, ``inputs``) or ``messages``, and may have ``max_tokens``,
    which goes before ``output``. Empty lines are left out. With ``repeat`` the file begins again
    when it is through; ``chat`` makes messages of plain prompts.

    Raises:
        ConfigError: a file that cannot be read or has nothing in it; the line is named.
    """
    rows = [_row(path, *line) for line in lines_of(path)]
    if not rows:
        raise ConfigError(f"{path} has no prompts", "put one on each line")
    return _requests(rows, tokenizer, output, seed, chat, shuffle, repeat)


def _requests(
    rows: list[tuple[str, list[dict[str, str]] | None, int | None]],
    tokenizer: TokenCounter,
    output: LengthDistribution,
    seed: int,
    chat: bool,
    shuffle: bool,
    repeat: bool,
) -> Iterator[BenchRequest]:
    dice = Random(f"file {seed}")
    while True:
        for prompt, given, length in dice.sample(rows, len(rows)) if shuffle else rows:
            messages = given or ([{"role": "user", "content": prompt}] if chat else None)
            yield BenchRequest(
                prompt=prompt,
                prompt_tokens=tokenizer.count(prompt, special=messages is None),
                max_tokens=length or output.draw(dice),
                messages=messages,
            )
        if not repeat:
            return


def _row(path: Path, number: int, line: str) -> tuple[str, list[dict[str, str]] | None, int | None]:
    if path.suffix not in (".jsonl", ".ndjson"):
        return line, None, None
    value = parsed(path, number, line)
    length = next((value[key] for key in _LENGTH_KEYS if key in value), None)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise _wrong(path, number, "max_tokens is no whole number above 0")
    messages = value.get("messages")
    if messages is not None:
        if not messages or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role")
            for m in messages
        ):
            raise _wrong(path, number, "messages need a role and a text each")
        turns = [{"role": str(m["role"]), "content": m["content"]} for m in messages]
        return "\n".join(turn["content"] for turn in turns), turns, length
    prompt = next((value[key] for key in _PROMPT_KEYS if key in value), None)
    if not isinstance(prompt, str) or not prompt:
        raise _wrong(path, number, f"no text under {', '.join(_PROMPT_KEYS)} or messages")
    return prompt, None, length


def sharegpt(
    path: Path,
    tokenizer: TokenCounter,
    output: LengthDistribution | None = None,
    seed: int = 0,
    *,
    chat: bool = True,
    turns: int = 1,
    think: float = 0.0,
    shuffle: bool = True,
    longest: int = 1 << 20,
    repeat: bool = True,
) -> Iterator[BenchRequest]:
    """Requests of a JSON file of conversations, as ShareGPT was published.

    ``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}]``;
    ``messages`` with ``role`` and ``content`` are taken too. Users' turns are sent; as many tokens
    are asked for as the answer in the file has, or as ``output`` says.

    Args:
        turns: of each conversation, at most; more than one makes conversations, whose later turns
            follow the answers after ``think`` seconds.
        longest: turns whose prompt has more tokens end their conversation.

    Raises:
        ConfigError: a file that cannot be read, or that has no such conversation.
    """
    try:
        content = decode_json(read_bytes(path, WORKLOAD_BYTES), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "name a JSON file") from error
    found = [pairs for item in content if (pairs := _pairs(item))] if _is_list(content) else []
    if not found:
        raise ConfigError(
            f"{path} has no conversation in which a user's turn is answered",
            'write [{"conversations": [{"from": "human", "value": "..."}, '
            '{"from": "gpt", "value": "..."}]}]',
        )
    return _turns(found, tokenizer, output, seed, chat, turns, think, shuffle, longest, repeat)


def _turns(
    found: list[list[tuple[str, str]]],
    tokenizer: TokenCounter,
    output: LengthDistribution | None,
    seed: int,
    chat: bool,
    turns: int,
    think: float,
    shuffle: bool,
    longest: int,
    repeat: bool,
) -> Iterator[BenchRequest]:
    dice = Random(f"sharegpt {seed}")
    number, sent = 0, True
    while sent:  # a round in which every turn is too long is the last
        sent = False
        for pairs in dice.sample(found, len(found)) if shuffle else found:
            for turn, (prompt, answer) in enumerate(pairs[:turns]):
                tokens = tokenizer.count(prompt, special=not chat)
                if tokens > longest:
                    break
                asked = output.draw(dice) if output else tokenizer.count(answer, special=False)
                sent = True
                yield BenchRequest(
                    prompt=prompt,
                    prompt_tokens=tokens,
                    max_tokens=max(1, asked),
                    messages=[{"role": "user", "content": prompt}] if chat else None,
                    conversation=number if turns > 1 else None,
                    think=think if turn else 0.0,
                )
            number += 1
        if not repeat:
            return
    raise ConfigError(
        f"every prompt of the file has more than {longest} tokens", "allow longer prompts"
    )


def _pairs(item: Any) -> list[tuple[str, str]]:
    """(user's turn, answer) of one conversation, as far as they take turns."""
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
    for (asks, prompt), (answers, answer) in zip(turns[::2], turns[1::2], strict=False):
        if asks not in _USERS or answers not in _ASSISTANTS:
            break
        if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt:
            break
        pairs.append((prompt, answer))
    return pairs


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The lines of a text file that are not empty, with their numbers. Raises ConfigError."""
    try:
        text = read_bytes(path, WORKLOAD_BYTES, pipes=True).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "name a text file") from error
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    """The JSON object of a line. Raises ConfigError."""
    try:
        value = decode_json(line.encode())
    except ValueError as error:
        raise _wrong(path, number, str(error)) from error
    if not isinstance(value, dict):
        raise _wrong(path, number, "no JSON object")
    return value


def _wrong(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"line {number} of {path}: {why}", "correct it, or take it out")


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
