"""Reads the calls in a complete text, and makes the parser of a region of calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from tgi_cli.text.formats.calls import CallStream, ToolCallArguments, ToolCallStart
from tgi_cli.text.formats.json_calls import JsonCallStream, ToolCallShape, shape_of
from tgi_cli.text.formats.literals import LiteralStream
from tgi_cli.text.formats.syntax import CallSyntax, TagSyntax, ToolFormat
from tgi_cli.text.formats.tags import TagStream
from tgi_cli.text.formats.values import ParameterTypes


def call_stream(
    syntax: CallSyntax | None,
    shape: ToolCallShape | None,
    types: ParameterTypes,
    captures: Mapping[str, str],
    names: Collection[str] | None = None,
) -> CallStream:
    """The parser of one region of calls.

    Args:
        syntax: How arguments are written, or None for JSON.
        shape: Where JSON has names and arguments.
        captures: Groups of the opening pattern.
        names: The only names that count, if given.
    """
    if syntax is None:
        return JsonCallStream(shape, captures, names)
    if isinstance(syntax, TagSyntax):
        return TagStream(syntax, types, names)
    return LiteralStream(syntax, types, names)


def read_calls(form: ToolFormat, text: str) -> list[tuple[str, Any]]:
    """The names and arguments of the calls in the first region of a text."""
    import regex

    opening = _pattern(form.region, "open")
    assert opening is not None
    opened = regex.search(opening, text)
    if opened is None:
        return []
    field = SimpleNamespace(
        content=form.region.get("content", "text"),
        content_args={},
        transform=form.region.get("transform"),
        transform_each=form.region.get("transform_each", False),
        open_re=opened.re,
    )
    captures = {key: value for key, value in opened.groupdict().items() if value is not None}
    stream = call_stream(form.syntax, shape_of(field), ParameterTypes(()), captures)
    rest = text[opened.end() :]
    close = _pattern(form.region, "close")
    closed = regex.search(close, rest) if close is not None else None
    inside = rest[: closed.start()] if closed is not None else rest
    found: list[tuple[str, list[str]]] = []
    for part in [*stream.begin(), *stream.push(inside), *stream.end(True)]:
        if isinstance(part, ToolCallStart):
            found.append((part.name, []))
        elif isinstance(part, ToolCallArguments):
            found[-1][1].append(part.text)
    try:
        return [(name, json.loads("".join(parts))) for name, parts in found]
    except ValueError:
        return []


def _pattern(region: Mapping[str, Any], key: str) -> str | None:
    """The pattern of a marker of a region."""
    import regex

    if key not in region:
        return region.get(f"{key}_pattern")
    texts = region[key] if isinstance(region[key], list) else [region[key]]
    return "|".join(map(regex.escape, texts))
