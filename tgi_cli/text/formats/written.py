"""Calls as a model writes them, for conversations whose template cannot render them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tgi_cli.text.formats.syntax import (
    INDEX,
    NAME,
    TYPE,
    LiteralSyntax,
    TagSyntax,
    ToolFormat,
)
from tgi_cli.text.grammar.json_schema import type_of


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """The text of some calls, given by name and arguments; None if the format has no grammar."""
    grammar = form.grammar
    if grammar is None:
        return None
    texts = [
        grammar.begin.replace(NAME, name).replace(INDEX, str(index))
        + _arguments(form, arguments)
        + grammar.end
        for index, (name, arguments) in enumerate(calls)
    ]
    return grammar.first + grammar.between.join(texts) + grammar.last


def _arguments(form: ToolFormat, arguments: Mapping[str, Any]) -> str:
    syntax = form.syntax
    if syntax is None or (isinstance(syntax, LiteralSyntax) and syntax.json):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(syntax, TagSyntax):
        return "".join(_tag(syntax, key, value) for key, value in arguments.items())
    between = ", " if syntax.equals == "=" else ","
    return between.join(
        f"{key}{syntax.equals}{_literal(syntax, value)}" for key, value in arguments.items()
    )


def _tag(syntax: TagSyntax, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    told = dict(syntax.types).get(type_of(value), "")
    opening = syntax.value.replace(TYPE, told)
    return f"{syntax.key}{key}{opening}{syntax.pad}{text}{syntax.pad}{syntax.close}{syntax.gap}"


def _literal(syntax: LiteralSyntax, value: Any) -> str:
    if not syntax.quotes:
        plain = value is None or isinstance(value, bool | str)
        return repr(value) if syntax.python and plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return f"{syntax.quotes}{value}{syntax.quotes}"
    if isinstance(value, Mapping):
        members = (f"{key}:{_literal(syntax, each)}" for key, each in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(_literal(syntax, each) for each in value)}]"
    return json.dumps(value)
