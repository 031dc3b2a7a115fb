"""Requests for benchmarks of speculative decoding: texts that repeat much, and texts that do not.

=========  ========================================================================================
workload   prompt
=========  ========================================================================================
rewrite    a passage of a module of the standard library, and some of its lines again
quote      passages of several modules, and some lines out of one of them, the last one unfinished
records    records of JSON with the same keys, up to the name of the next one
chat       the beginning of a module, sampled at temperature 1
=========  ========================================================================================

A prompt is one of :data:`CONTEXTS` contexts and an ending, which differs from wave to wave (that of
a chat is empty: its seed differs). So a server with a prefix cache computes each context once, and
answers differ nevertheless.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tests.tools.demo import corpus

LENGTH = 2048
"""Tokens of a prompt and its answer, at most: what the trained model has."""

CONTEXTS = 8
"""Contexts of a workload, which clients take in turns."""

_VOCABULARY = range(256, 1024)
"""Tokens that every model has, and that are no special ones."""


class Workload(NamedTuple):
    """How the prompts of a workload are made.

    Attributes:
        context: returns the beginnings of prompts, in parts.
        ending: returns what follows the parts of a context.
        separator: of the parts.
        temperature: of the requests.
    """

    context: Callable[[random.Random], list[str]]
    ending: Callable[[list[str], random.Random], str]
    separator: str
    temperature: float


@functools.cache
def _modules() -> list[str]:
    """The sources that the trained model has not seen."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    return [each.text for each in corpus.read_modules(stdlib) if corpus.is_heldout(each)]


def _lines(chance: random.Random, count: int) -> list[str]:
    lines = chance.choice(_modules()).splitlines()
    start = chance.randrange(max(1, len(lines) - count))
    return lines[start : start + count]


def _rewritten(passage: list[str], chance: random.Random) -> str:
    start = chance.randrange(len(passage) // 3)
    return "\n".join(["\n", *passage[start : start + 4], ""])


def _quoted(passages: list[str], chance: random.Random) -> str:
    lines = chance.choice(passages).splitlines()
    start = chance.randrange(max(1, len(lines) // 3))
    return "\n".join(["\n", *lines[start : start + 3]])


def _records(chance: random.Random) -> list[str]:
    words = re.findall(r"[a-z]{4,}", chance.choice(_modules()))
    rows = [
        {
            "name": chance.choice(words),
            "kind": "module",
            "lines": chance.randrange(900),
            "tests": [],
        }
        for _ in range(8)
    ]
    return [json.dumps(rows, indent=2)[:-2]]


def _next_record(rows: list[str], chance: random.Random) -> str:
    return ',\n  {\n    "name": "' + "".join(chance.choices("abcdefghijklmnoprstuvw", k=2))


def _beginning(chance: random.Random) -> list[str]:
    text = chance.choice(_modules())
    start = chance.randrange(max(1, len(text) - 400))
    return [text[start : start + 400]]


WORKLOADS = {
    "rewrite": Workload(lambda chance: _lines(chance, 32), _rewritten, "\n", 0.0),
    "quote": Workload(
        lambda chance: ["\n".join(_lines(chance, 18)) for _ in range(3)], _quoted, "\n\n", 0.0
    ),
    "records": Workload(_records, _next_record, "", 0.0),
    "chat": Workload(_beginning, lambda text, chance: "", "", 1.0),
}


class Texts:
    """Makes the bodies of requests to ``/v1/completions``.

    Args:
        tokenizer: of the model.
        seed: of all texts.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._contexts = {
            workload: self._contexts_of(workload, how) for workload, how in WORKLOADS.items()
        }

    def _contexts_of(self, workload: str, how: Workload) -> list[tuple[list[str], list[int]]]:
        found = []
        for number in range(CONTEXTS):
            parts = how.context(random.Random(f"{self._seed} {workload} {number}"))
            found.append((parts, self._ids(how.separator.join(parts))))
        return found

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def wave(self, workload: str, clients: int, tokens: int, number: int) -> list[dict[str, Any]]:
        """The requests of one wave, with answers of ``tokens`` tokens."""
        how = WORKLOADS[workload]
        chance = random.Random(f"{self._seed} {workload} {clients} {number}")
        found = []
        for client in range(clients):
            parts, context = self._contexts[workload][(client + number) % CONTEXTS]
            ids = context + self._ids(how.ending(parts, chance))
            found.append(_body(ids[-(LENGTH - tokens) :], tokens, how.temperature, chance))
        return found

    def holding(self, tokens: int, number: int) -> dict[str, Any]:
        """A request whose prompt keeps a server busy while others arrive: ``tokens`` new ones."""
        chance = random.Random(f"{self._seed} holding {number}")
        return _body(chance.choices(_VOCABULARY, k=tokens), 1, 0.0, chance)


def _body(
    prompt: list[int], tokens: int, temperature: float, chance: random.Random
) -> dict[str, Any]:
    return {
        "model": "tgi",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": chance.randrange(1 << 31),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
