"""Thinking budgets of the Python API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from tgi_cli.engine.thinking import ThinkingBudget, ThinkingProgress
from tgi_cli.llm.options import Prompt
from tgi_cli.text.bundle import TextBundle


class ThinkingBudgets:
    """Makes the budgets of prompts; how the model marks reasoning is read for the first of them.

    Args:
        model_path: The model's folder.
        trust_remote_code: Allow the folder to run its own code.
    """

    def __init__(self, model_path: Path, trust_remote_code: bool) -> None:
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code

    @cached_property
    def _text(self) -> TextBundle:
        return TextBundle.load(self._model_path, self._trust_remote_code, reasoning_parser="auto")

    def of(self, prompt: Prompt, tokens: int | None) -> ThinkingBudget | None:
        """The most reasoning after a prompt, or None for any.

        Raises:
            ValueError: Reasoning is not marked, or not by added tokens.
        """
        if tokens is None:
            return None
        tokenizer, form = self._text.tokenizer, self._text.response_format
        if form is None:
            raise ValueError("thinking_token_budget: this model's reasoning, if any, is not marked")
        try:
            budget = form.markers.budget(tokens, False, tokenizer)
        except ValueError as error:
            raise ValueError(f"thinking_token_budget: {error}") from None
        return replace(budget, inside=_ends_inside(prompt.ids, budget, tokenizer.special_ids))


def _ends_inside(
    prompt_ids: Sequence[int], budget: ThinkingBudget, special_ids: frozenset[int]
) -> bool:
    """Whether a prompt ends within reasoning.

    Other special tokens separate turns: a marker in the text of an earlier one is only text.
    """
    turns = special_ids.difference(budget.token_ids)
    last = next((i for i in range(len(prompt_ids), 0, -1) if prompt_ids[i - 1] in turns), 0)
    progress = ThinkingProgress(budget)
    for token_id in prompt_ids[last:]:
        progress.accept(token_id)
    return progress.inside
