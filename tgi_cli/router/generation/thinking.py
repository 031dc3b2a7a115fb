"""How much a chat's model may think: effort and budget, in the parameters of any API.

An effort is advice that the chat template passes on to the model. Templates that do not use it
ignore it, and no number of tokens follows from it: clients send one by default, and must not get
answers whose reasoning is cut short. Only ``none`` is a rule, which a budget of 0 enforces where
the template cannot.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.router.api.openai_parameters import one_of
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.http import errors
from tgi_cli.text.response_format import ResponseFormat
from tgi_cli.text.tokenizer import Tokenizer

_NO_EFFORT = "none"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking on and off (Qwen3's and DeepSeek V3.1's)."""
_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens")


def requested_effort(body: ChatRequest) -> str | None:
    """The reasoning effort, or None for the model's default. Raises ApiError."""
    given = body.reasoning
    if given is None:
        return body.reasoning_effort
    effort = _NO_EFFORT if given.enabled is False else given.effort
    if None not in (effort, body.reasoning_effort) and effort != body.reasoning_effort:
        raise errors.validation(
            "`reasoning_effort` and `reasoning` mean the same and differ", "reasoning"
        )
    return body.reasoning_effort if effort is None else effort


def thinking_variables(body: ChatRequest) -> dict[str, Any]:
    """The variables of the chat template for the requested effort. Raises ApiError."""
    effort = requested_effort(body)
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    thinks = effort != _NO_EFFORT
    if not thinks or (body.reasoning is not None and body.reasoning.enabled):
        variables |= dict.fromkeys(_SWITCHES, thinks)
    return variables


def includes_reasoning(body: ChatRequest) -> bool:
    """Whether the answer contains the reasoning."""
    excluded = body.reasoning is not None and body.reasoning.exclude
    return body.include_reasoning is not False and not excluded


def thinking_budget(
    body: ChatRequest,
    form: ResponseFormat | None,
    is_reasoning: bool,
    tokenizer: Tokenizer,
    info: EngineInfo,
) -> ThinkingBudget | None:
    """The most reasoning that a chat may have, or None for any.

    Args:
        form: How responses are parsed, or None if they are plain text.
        is_reasoning: The response begins within reasoning.

    Raises:
        ApiError: A budget is out of range, or the engine cannot enforce what was asked for by the
            name of the budget. ``reasoning.max_tokens`` and efforts come from clients that know
            nothing of the model, so they have no effect then.
    """
    name, tokens = one_of(body, *_BUDGETS)
    strict = tokens is not None
    if tokens is None and body.reasoning is not None:
        name, tokens = "reasoning", body.reasoning.max_tokens
    if tokens is not None and tokens < -1:
        raise errors.validation(f"`{name}` must be >= -1. Given: {tokens}", name)
    if tokens is None and requested_effort(body) == _NO_EFFORT:
        given = body.chat_template_kwargs or {}
        tokens = None if any(given.get(name) for name in _SWITCHES) else 0
    if tokens is None or tokens == -1:
        return None
    try:
        if form is None:
            raise ValueError("this model's reasoning, if any, is not marked")
        most = min(tokens, info.max_total_tokens)
        found = form.markers.budget(most, is_reasoning, tokenizer)
        if max(found.token_ids) >= info.vocab_size:
            raise ValueError("the model cannot generate the markers of its reasoning")
    except ValueError as error:
        if not strict:
            return None
        raise errors.unsupported(name, f"`{name}` ({error})") from None
    return found
