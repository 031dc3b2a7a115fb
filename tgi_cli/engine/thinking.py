"""Thinking budgets: a bound of the tokens that a model may spend on reasoning.

The parameter is vLLM's ``thinking_token_budget``
(https://docs.vllm.ai/en/latest/features/reasoning_outputs.html), llama.cpp's
``thinking_budget_tokens`` and Anthropic's ``thinking.budget_tokens``. Once the budget is spent, the
engine appends the closing marker as forced tokens, so that the answer follows the prompt, the
reasoning up to there and the marker. They need no sampling and no mask: until then, a budget adds
no cost to steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """The limit of reasoning of one request, and the markers of its model.

    Attributes:
        tokens: most tokens between the markers, over all reasoning of the answer; 0 closes it at
            once.
        open: token ids of the opening marker.
        close: token ids of the closing marker.
        then: token ids that are forced after the closing marker.
        answer: token ids that are forced after those if the model opens reasoning again after the
            budget has been enforced; without them it might do so forever.
        inside: the prompt ends within reasoning, which counts from there.

    Raises:
        ValueError: a marker is empty, or ``tokens`` is negative.
    """

    tokens: int
    open: tuple[int, ...]
    close: tuple[int, ...]
    then: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    inside: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError("a thinking budget must not be negative")
        if not self.open or not self.close:
            raise ValueError("a thinking budget needs an opening and a closing marker")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids in it."""
        return (*self.open, *self.close, *self.then, *self.answer)


class ThinkingProgress:
    """Follows the tokens of one sequence with a budget.

    Attributes:
        inside: whether the next token belongs to reasoning or to its closing marker.
        tokens: tokens of reasoning so far. An unfinished closing marker counts, so that the
            budget is an upper bound even if what looked like the marker was none.
    """

    __slots__ = ("_budget", "_enforced", "_matched", "inside", "tokens")

    def __init__(self, budget: ThinkingBudget) -> None:
        self.inside = budget.inside
        self.tokens = 0
        self._budget = budget
        self._matched = 0
        self._enforced = False

    def accept(self, token_id: int) -> None:
        """Advance by the next token, whether it was sampled or forced.

        With all of :func:`~tgi_cli.engine.forced_tokens.follow`, 0.6 us on one 2025 server core.
        """
        budget = self._budget
        marker = budget.close if self.inside else budget.open
        self.tokens += self.inside
        if not self._matched and token_id != marker[0]:
            return
        self._matched = _matched((*marker[: self._matched], token_id), marker)
        if self._matched == len(marker):
            if self.inside:
                self.tokens -= len(marker)
            self.inside = not self.inside
            self._matched = 0

    def due(self) -> tuple[int, ...]:
        """The tokens that must follow now; empty as long as the model may choose."""
        budget = self._budget
        if not self.inside or self.tokens < budget.tokens:
            return ()
        rest = budget.close[self._matched :] + budget.then
        return rest + budget.answer if self._enforced else rest

    def enforce(self) -> None:
        """Note that the tokens that were due are appended."""
        self._enforced = True


def _matched(tokens: Sequence[int], marker: Sequence[int]) -> int:
    """Length of the longest beginning of ``marker`` that ``tokens`` end with."""
    return next(
        (n for n in range(len(tokens), 0, -1) if tuple(tokens[-n:]) == tuple(marker[:n])), 0
    )
