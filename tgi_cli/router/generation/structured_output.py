"""Structured output: the grammar that a request asks for, in the parameters of any API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tgi_cli.router.api.schemas.openai import CompletionParameters
from tgi_cli.router.generation.chat_tools import ChatTools
from tgi_cli.router.http import errors
from tgi_cli.text.grammar import grammar
from tgi_cli.text.grammar.grammar import Grammar, GrammarError
from tgi_cli.text.response_format import ResponseFormat
from tgi_cli.text.tools import tool_grammar

T = TypeVar("T")

_GUIDED = {
    "guided_json": "guided_json",
    "guided_regex": "guided_regex",
    "guided_choice": "guided_choice",
    "guided_grammar": "guided_grammar",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}
"""Parameters of vLLM, llama.cpp and SGLang, and the parameter of vLLM with the same meaning."""


def tgi_grammar(parameter: Any) -> Grammar | None:
    """The grammar of TGI's ``grammar`` parameter. Raises ApiError."""
    return None if parameter is None else _parse(grammar.parse_tgi, parameter, "grammar")


def openai_grammar(request: CompletionParameters) -> Grammar | None:
    """The grammar of ``response_format``, or of other servers' parameters. Raises ApiError."""
    found: list[Grammar] = []
    if request.response_format is not None:
        _add(
            found, _parse(grammar.parse_response_format, request.response_format, "response_format")
        )
    if request.structured_outputs is not None:
        value = request.structured_outputs
        _add(found, _parse(grammar.parse_structured_outputs, value, "structured_outputs"))
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        if value is not None and value != "":
            _add(found, _guided(name, kind, value, request.guided_whitespace_pattern))
    if isinstance(request.grammar, str):  # llama.cpp's, in GBNF
        if request.grammar:
            _add(found, _guided("grammar", "guided_grammar", request.grammar, None))
    else:
        _add(found, tgi_grammar(request.grammar))
    if len(found) > 1:
        names = " and ".join(f"`{each.param}`" for each in found)
        raise errors.validation(f"{names} exclude each other", found[1].param)
    return found[0] if found else None


def grammar_unsupported(param: str) -> errors.ApiError:
    """TGI's error if grammars are disabled, or unsupported for this model."""
    return errors.validation("grammar is not supported", param)


def invalid_grammar(error: GrammarError, param: str) -> errors.ApiError:
    """The error for an invalid grammar; TGI's for its own parameter."""
    name = param if param == "grammar" else f"`{param}`"
    return errors.validation(f"{name} is not valid: {error}", param)


def _add(found: list[Grammar], grammar: Grammar | None) -> None:
    if grammar is not None:
        found.append(grammar)


def _guided(name: str, kind: str, value: Any, whitespace: str | None) -> Grammar:
    read = _parse(lambda data: grammar.parse_guided(kind, data, whitespace), value, name)
    return replace(read, param=name)


def _parse(parser: Callable[[Any], T], value: Any, param: str) -> T:
    try:
        return parser(value)
    except GrammarError as error:
        raise invalid_grammar(error, param) from error


def chat_grammar(
    content: Grammar | None,
    tools: ChatTools,
    parallel: bool,
    form: ResponseFormat,
    reasoning: bool,
    *,
    constrain: bool,
) -> Grammar | None:
    """The grammar of a whole response: reasoning, then tool calls or ``content``.

    Args:
        content: Grammar of the content, or None if it is free.
        tools: The request's tools.
        parallel: Whether there may be several calls.
        form: How the responses of the model are parsed.
        reasoning: Whether the response begins within reasoning.
        constrain: Whether to constrain optional calls.

    Raises:
        ApiError: The calls cannot be constrained as required.
    """
    forced = tools.choice != "auto"
    allowed = tools.allowed
    tag = tool_grammar(allowed, tools.choice, parallel, form.tools) if allowed else None
    if tag is not None and not tag["triggers"][0]:
        tag = {**tag, "triggers": []} if forced or content is not None else None
    if tools.grammars and (tag is None or not constrain):
        raise errors.unsupported("tools", "the grammar of a custom tool (with this model's calls)")
    if allowed and tag is None and (forced or content is not None):
        raise errors.unsupported(
            "tool_choice" if forced else "response_format",
            "a `tool_choice` other than `auto` and `none` (with this model's tool calls)"
            if forced
            else "`response_format` together with `tools` (with this model's tool calls)",
        )
    if tag is None:
        return None if content is None else content.behind(form.markers.before(reasoning))
    if not forced and content is None and not constrain:
        return None
    structures = [
        {
            **each,
            "strict": each["name"] in tools.strict,
            "text": tools.grammars.get(each["name"]),
        }
        for each in tag["structures"]
    ]
    tag = {**tag, "structures": structures}
    if not forced and content is not None:
        tag |= {"otherwise": content, "otherwise_begin": form.markers.then}
    param = "tool_choice" if forced else "tools"
    found = _parse(lambda tag: grammar.parse_structural_tag(tag, param), tag, param)
    if not forced and content is None:
        return found
    return found.behind(replace(form.markers, then="").before(reasoning))
