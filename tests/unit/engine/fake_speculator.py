"""Speculators whose drafts are right, wrong, or right up to a point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tgi_cli.engine.sequence import Sequence as Running
from tgi_cli.engine.step import Proposal, Step

DRAFTERS = ("perfect", "wrong", "partly", "random", "repeats")


class FakeSpeculator:
    """Proposes drafts out of what each request is expected to answer.

    Args:
        kind: one of DRAFTERS.
        expected: the whole answer of a request id.
        vocab_size: number of tokens.
        rests: share of the steps for which it says beforehand that it proposes nothing. It keeps to
            that for sequences whose tokens the host does not know.
    """

    asks_worker = False

    def __init__(
        self,
        kind: str,
        expected: Callable[[int], Sequence[int]],
        seed: int = 0,
        vocab_size: int = 1000,
        rests: float = 0.0,
    ) -> None:
        self._vocab_size = vocab_size
        self._rests = rests
        self.kind = kind
        self.drafted = self.accepted = 0
        self.finished: list[int] = []
        self._expected = expected
        self._random = Random(seed)

    def may_propose(self, sequences: Sequence[Running], others: int = 0) -> bool:
        assert sequences
        assert others >= 0
        return self._random.random() >= self._rests

    def propose(
        self, sequences: Sequence[Running], waiting: bool, others: int = 0
    ) -> list[list[int]]:
        return [self._propose(sequence) for sequence in sequences]

    def _propose(self, sequence: Running) -> list[int]:
        assert not sequence.placeholders, "the host does not know all of its tokens"
        random = self._random
        length = random.choice((0, 1, 2, 3, 7, 40))
        done = len(sequence.token_ids) - sequence.prompt_tokens
        right = list(self._expected(sequence.request.request_id)[done : done + length])
        if self.kind == "perfect":
            return right
        if self.kind == "wrong":
            return [(token + 1) % self._vocab_size for token in right]
        if self.kind == "partly" and right:
            at = random.randrange(len(right))
            right[at] = (right[at] + 1) % self._vocab_size
            return right
        if self.kind == "repeats":
            return [sequence.token_ids[-1]] * length
        return [random.randrange(self._vocab_size) for _ in range(length)]

    def ask(self, sequences: Sequence[Running]) -> list[int] | None:
        raise AssertionError("it takes drafts from what is expected alone")

    def proposed(self, sequence: Running, proposal: Proposal) -> None:
        raise AssertionError("it has asked for nothing")

    def learn(self, sequence: Running, drafts: Sequence[int], accepted: int) -> None:
        assert 0 <= accepted <= len(drafts)
        self.drafted += len(drafts)
        self.accepted += accepted

    def finish(self, sequence: Running) -> None:
        self.finished.append(sequence.request.request_id)

    def timed(self, step: Step, seconds: float) -> None:
        assert seconds > 0
