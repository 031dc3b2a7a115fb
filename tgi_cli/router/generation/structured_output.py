"""What a request asks its answer to be, by whatever parameter of whatever API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tgi_cli.router.api.schemas.openai import CompletionParameters
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
"""vLLM's parameters, llama.cpp's and SGLang's, and as which of vLLM's each is read."""


def native_grammar(asked: Any) -> Grammar | None:
    """Of TGI's parameter. Raises ApiError."""
    return None if asked is None else _read(grammar.native, asked, "grammar")


def openai_grammar(request: CompletionParameters) -> Grammar | None:
    """Of ``response_format``, or of what other servers call it. Raises ApiError."""
    found: list[Grammar] = []
    if request.response_format is not None:
        _add(found, _read(grammar.response_format, request.response_format, "response_format"))
    if request.structured_outputs is not None:
        asked = request.structured_outputs
        _add(found, _read(grammar.structured_outputs, asked, "structured_outputs"))
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        if value is not None and value != "":
            _add(found, _guided(name, kind, value, request.guided_whitespace_pattern))
    if isinstance(request.grammar, str):  # llama.cpp's, in GBNF
        if request.grammar:
            _add(found, _guided("grammar", "guided_grammar", request.grammar, None))
    else:
        _add(found, native_grammar(request.grammar))
    if len(found) > 1:
        names = " and ".join(f"`{each.param}`" for each in found)
        raise errors.validation(f"{names} exclude each other", found[1].param)
    return found[0] if found else None


def not_supported(param: str) -> errors.ApiError:
    """In TGI's words: the server has no grammars, or none for this model."""
    return errors.validation("grammar is not supported", param)


def not_valid(error: GrammarError, param: str) -> errors.ApiError:
    """In TGI's words where it is TGI's parameter."""
    name = param if param == "grammar" else f"`{param}`"
    return errors.validation(f"{name} is not valid: {error}", param)


def _add(found: list[Grammar], grammar: Grammar | None) -> None:
    if grammar is not None:
        found.append(grammar)


def _guided(name: str, kind: str, value: Any, whitespace: str | None) -> Grammar:
    read = _read(lambda asked: grammar.guided(kind, asked, whitespace), value, name)
    return replace(read, param=name)


def _read(reader: Callable[[Any], T], asked: Any, param: str) -> T:
    try:
        return reader(asked)
    except GrammarError as error:
        raise not_valid(error, param) from error


def chat_grammar(
    content: Grammar | None,
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    parallel: bool,
    strict: Collection[str],
    form: ResponseFormat,
    reasoning: bool,
    *,
    constrain: bool,
) -> Grammar | None:
    """Of a whole answer: reasoning, then calls of tools, or else what ``content`` says.

    Args:
        choice: of tools: ``auto``, ``required``, a name, or OpenAI's object around it.
        strict: names of the tools whose schemas must hold; those of others, where they can.
        reasoning: whether the answer begins within it.
        constrain: whether calls that may be, but need not, are constrained.

    Raises ApiError for calls that cannot be made sure of.
    """
    if choice not in ("auto", "required") and not isinstance(choice, Mapping):
        choice = {"function": {"name": choice}}
    forced = choice != "auto"
    tag = tool_grammar(tools, choice, parallel, form.tools) if tools else None
    if tag is not None and not tag["triggers"][0]:
        tag = {**tag, "triggers": [], "at_most": 1} if forced or content is not None else None
    if tools and tag is None and (forced or content is not None):
        raise errors.unsupported(
            "tool_choice" if forced else "response_format",
            "a `tool_choice` other than `auto` and `none` (with this model's way to call)"
            if forced
            else "`response_format` together with `tools` (with this model's way to call)",
        )
    if tag is None:
        return None if content is None else content.behind(form.markers.before(reasoning))
    if not forced and content is None and not constrain:
        return None
    structures = [{**each, "strict": each["name"] in strict} for each in tag["structures"]]
    asked = {**tag, "structures": structures}
    if not forced and content is not None:
        asked |= {"otherwise": content, "otherwise_begin": form.markers.then}
    param = "tool_choice" if forced else "tools"
    found = _read(lambda tag: grammar.structural_tag(tag, param), asked, param)
    if not forced and content is None:
        return found
    return found.behind(replace(form.markers, then="").before(reasoning))
