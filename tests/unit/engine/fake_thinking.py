"""What a request with a thinking budget must answer, from a scan of all tokens at every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.unit.engine.fake_worker import continuation
from tgi_cli.engine.thinking import ThinkingBudget

CLOSE = (1001, 1002)
"""Beyond the fake model's vocabulary: only the engine writes it."""


def budget(tokens: int, *, inside: bool = True, **more: Any) -> ThinkingBudget:
    return ThinkingBudget(tokens=tokens, inside=inside, **{"open": (1000,), "close": CLOSE} | more)


def reasoning(answer: Sequence[int], budget: ThinkingBudget) -> tuple[int, bool]:
    """How many tokens of the answer are reasoning, and whether it ends within reasoning."""
    answer = tuple(answer)
    inside, count, place = budget.inside, 0, 0
    while place < len(answer):
        marker = budget.close if inside else budget.open
        if answer[place : place + len(marker)] == marker:
            inside, place = not inside, place + len(marker)
        else:
            count, place = count + inside, place + 1
    return count, inside


def budgeted(
    prompt: Sequence[int], count: int, budget: ThinkingBudget, adapter_id: int = 0
) -> list[int]:
    """The fake model's own tokens, with the closing marker wherever the budget is spent."""
    answer: list[int] = []
    enforced = False
    while len(answer) < count:
        spent, inside = reasoning(answer, budget)
        forced = (*budget.close, *budget.then, *(budget.answer if enforced else ()))
        if inside and spent >= budget.tokens and (answer or len(forced) < count):
            begun = max(
                n for n in range(spent + 1) if tuple(answer[-n:] if n else ()) == forced[:n]
            )
            answer += forced[begun:]
            enforced = True
        else:
            answer += continuation([*prompt, *answer], 1, 1000, adapter_id)
    return answer[:count]
