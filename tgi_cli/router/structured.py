"""What a request asks its answer to be, by whatever parameter of whatever API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tgi_cli.router import errors
from tgi_cli.router.schemas.openai import Sampling
from tgi_cli.text import grammar
from tgi_cli.text.grammar import Grammar, GrammarError

T = TypeVar("T")

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def native_grammar(asked: Any) -> Grammar | None:
    """Of TGI's parameter. Raises ApiError."""
    return None if asked is None else _read(grammar.native, asked, "grammar")


def openai_grammar(request: Sampling) -> Grammar | None:
    """Of ``response_format``, or of what vLLM calls it. Raises ApiError."""
    found: list[Grammar] = []
    if request.response_format is not None:
        _add(found, _read(grammar.response_format, request.response_format, "response_format"))
    if request.structured_outputs is not None:
        asked = request.structured_outputs
        _add(found, _read(grammar.structured_outputs, asked, "structured_outputs"))
    for name in _GUIDED:
        value = getattr(request, name)
        if value is not None:
            _add(found, _guided(name, value, request.guided_whitespace_pattern))
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


def _guided(name: str, value: Any, whitespace: str | None) -> Grammar:
    return _read(lambda asked: grammar.guided(name, asked, whitespace), value, name)


def _read(reader: Callable[[Any], T], asked: Any, param: str) -> T:
    try:
        return reader(asked)
    except GrammarError as error:
        raise not_valid(error, param) from error
