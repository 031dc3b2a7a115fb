"""Grammars whose sentences are rows of slots, each with the tokens that it allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unit.engine.fake_worker import digest, next_token, root
from tgi_cli.engine.step import GrammarMatcher

EOS = 7
VOCAB = 1000


def slots(*choices: Sequence[int], repeat: bool = False) -> str:
    """A grammar of these slots, one after another; with ``repeat``, any number of rounds."""
    return json.dumps([[list(choice) for choice in choices], repeat])


class FakeMatcher:
    def __init__(self, grammar: str, error_at: int = -1) -> None:
        self.slots, self.repeat = json.loads(grammar)
        self.error = ""
        self.position = 0
        self.ended = False
        self._error_at = error_at

    @property
    def stopped(self) -> bool:
        return self.ended or (not self.repeat and self.position == len(self.slots))

    def allowed(self) -> list[int]:
        if self.stopped:
            return [EOS]
        options = sorted(self.slots[self.position % len(self.slots)])
        over = self.repeat and self.position and self.position % len(self.slots) == 0
        return sorted([*options, EOS]) if over else options

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed() or self.position == self._error_at:
            self.error = f"not at position {self.position}\nand more"
            return False
        self.ended = token_id == EOS
        self.position += not self.ended
        return True

    def copy(self) -> FakeMatcher:
        copy = FakeMatcher(json.dumps([self.slots, self.repeat]))
        copy.position, copy.ended = self.position, self.ended
        return copy

    def allows(self, token_ids: Sequence[int]) -> bool:
        return self.num_allowed(token_ids) == len(token_ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        ahead = self.copy()
        return sum(1 for _ in takewhile(ahead.accept, token_ids))

    def forced(self) -> list[int]:
        ahead = self.copy()
        tokens: list[int] = []
        while not ahead.stopped and len(ahead.allowed()) == 1 and len(tokens) < 50:
            tokens += ahead.allowed()
            assert ahead.accept(tokens[-1])
        return tokens


class FakeCompiler:
    """Compiles at once, or with ``slow`` when :meth:`finish` is called."""

    eos_token_ids = (EOS, 3)

    def __init__(self, slow: bool = False, jumps: bool = True) -> None:
        self.slow = slow
        self.jumps = jumps
        self.compiled: list[str] = []
        self.waiting: list[tuple[str, Future[GrammarMatcher]]] = []
        self.error_at = -1

    def compile(self, grammar: str) -> Future[GrammarMatcher]:
        future: Future[GrammarMatcher] = Future()
        self.waiting.append((grammar, future))
        if not self.slow:
            self.finish()
        return future

    def finish(self) -> None:
        """All grammars that were compiled."""
        while self.waiting:
            grammar, future = self.waiting.pop(0)
            self.compiled.append(grammar)
            if grammar.startswith("["):
                matcher = FakeMatcher(grammar, self.error_at)
                if not self.jumps:
                    matcher.forced = list  # type: ignore[assignment, method-assign]
                future.set_result(matcher)
            else:
                future.set_exception(ValueError(f"what is {grammar}?\nreally"))

    def fill(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> Any:
        rows: list[list[int]] = []
        for matcher, tokens in zip(matchers, drafts or [()] * len(matchers), strict=True):
            assert isinstance(matcher, FakeMatcher)
            assert not matcher.stopped, "a stopped matcher is not queried"
            ahead: FakeMatcher | None = matcher.copy()
            rows.append(matcher.allowed())
            for token in tokens:
                ahead = ahead if ahead is not None and ahead.accept(token) else None
                rows.append(list(range(VOCAB)) if ahead is None else ahead.allowed())
        allowed = np.zeros((len(rows), -(-VOCAB // 32) * 32), np.uint8)
        for row, ids in zip(allowed, rows, strict=True):
            row[ids] = 1
        bits: NDArray[np.int32] = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        return bits


def constrained(prompt: Sequence[int], count: int, grammar: str, adapter_id: int = 0) -> list[int]:
    """What the fake model answers under a grammar, computed alone and token by token."""
    context, matcher = root(adapter_id), FakeMatcher(grammar)
    for token in prompt:
        context = digest(context, token)
    answer: list[int] = []
    while len(answer) < count:
        token = next_token(context, VOCAB, matcher.allowed())
        if token < 0:
            break
        answer.append(token)
        assert matcher.accept(token)
        if token == EOS:
            break
        context = digest(context, token)
    return answer
