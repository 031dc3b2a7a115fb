"""How formats of tool calls are described.

A format has a region, which is a field of a response template, transformers' description of a
model's responses (https://huggingface.co/docs/transformers/main/chat_response_parsing): what opens
it, what closes it, and, if calls are JSON, how its content becomes a part of the message. Calls
whose arguments are not JSON have a syntax of their own, with a parser in
:mod:`tgi_cli.text.formats.tags` or :mod:`tgi_cli.text.formats.literals`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Field = Mapping[str, Any]

NAME, INDEX, TYPE = "NAME", "INDEX", "TYPE"
"""Placeholders in texts: the function's name, the number of the call, the type of a value."""

MOST_SPACE = 64
"""Most white space characters that a pattern accepts where a format has some."""
LONGEST_NAME = 256
"""Most characters of a function's or an argument's name."""


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """The texts around the arguments of tool calls, for constrained decoding.

    Attributes:
        trigger: Text that begins like this is a call. If empty, only a forced call can be
            constrained.
        begin: Text in front of one call's arguments, with ``NAME`` and perhaps ``INDEX``.
        end: Text after one call's arguments.
        between: Text between two calls of one response.
        first: Text in front of all calls.
        last: Text after all calls.
        single: A response has at most one call.
    """

    trigger: str
    begin: str
    end: str
    between: str = "\n"
    first: str = ""
    last: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """Arguments as tagged values.

    A call is ``begin NAME named``, then for each argument ``key KEY value VALUE close``, then
    ``end``. In the patterns made of these texts, white space in them and between two tags is
    optional.

    Attributes:
        begin: Text in front of the name. If it and ``named`` are empty, the name is the region's
            first word.
        named: Text after the name; may have ``INDEX``.
        key: Text in front of a key.
        value: Text between a key and its value. ``TYPE`` in it is the type.
        close: Text after a value.
        end: Text after the last argument; empty if the region ends there.
        gap: White space after ``named``, and after each argument.
        pad: White space around a value that is not part of it.
        types: For each JSON type, the text in the place of ``TYPE``.
        cdata: A value may be in a CDATA section, as in XML.
    """

    begin: str
    named: str
    key: str
    value: str
    close: str
    end: str = ""
    gap: str = ""
    pad: str = ""
    types: tuple[tuple[str, str], ...] = ()
    cdata: bool = False


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """Arguments as the literals of a programming language.

    A call is ``begin NAME open``, then arguments ``KEY equals VALUE`` with commas between them,
    then ``close``.

    Attributes:
        quotes: Texts around a string without escapes; empty: Python's and JSON's strings.
        python: Whether the model writes ``True`` and ``None`` instead of ``true`` and ``null``.
        json: The arguments are JSON; ``open`` and ``close`` are or end with its brackets.
    """

    begin: str
    open: str
    equals: str
    close: str
    quotes: str = ""
    python: bool = False
    json: bool = False


CallSyntax = TagSyntax | LiteralSyntax


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        region: Field of a response template.
        marks: Groups of texts. A model that has all texts of a group, in its chat template or as
            tokens, uses the format.
        bare: No marker distinguishes a call from similar text, so only names of the request's
            tools count.
        id_length: Number of letters and digits in a call's id; 0 for OpenAI's form. The group
            ``id`` of the opening pattern, if any, takes precedence.
        grammar: Texts around the arguments, or None if nothing marks the beginning of a call.
        syntax: How arguments are written, or None for JSON.
    """

    region: Field
    marks: tuple[tuple[str, ...], ...] = ()
    bare: bool = False
    id_length: int = 0
    grammar: ToolCallGrammar | None = None
    syntax: CallSyntax | None = None


def region_of(content: str, name: str, arguments: str, **keys: Any) -> Field:
    """A region of calls, with the placeholders of their names and arguments."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"repeats": True, "content": content, "transform": call, **keys}


def json_objects(
    opening: str,
    close: str,
    marks: tuple[tuple[str, ...], ...] = (),
    *,
    keys: tuple[str, str] = ("name", "arguments"),
    before: str = "",
    after: str = "",
    between: str = "\n",
    inside: bool = False,
    **options: Any,
) -> ToolFormat:
    """Calls ``{"name": ..., "arguments": {...}}`` between two markers.

    Args:
        keys: Keys of the name and the arguments.
        before: White space after the opening marker.
        after: White space in front of the closing marker.
        between: Text between two calls.
        inside: The markers are around all calls, not each.
    """
    name, arguments = keys
    begin = f'{{"{name}": "{NAME}", "{arguments}": '
    return ToolFormat(
        region_of(
            "json",
            f"{{content.{name}}}",
            f"{{content.{arguments}}}",
            open=opening,
            **({"close": close} if close else {}),
        ),
        marks,
        grammar=_between(opening, close, begin, "}", before, after, between, inside),
        **options,
    )


def json_list(
    opening: str,
    close: str,
    marks: tuple[tuple[str, ...], ...] = (),
    *,
    keys: tuple[str, str] = ("name", "arguments"),
    begin: str = "",
    before: str = "",
    after: str = "",
    between: str = ", ",
    **options: Any,
) -> ToolFormat:
    """A JSON list of calls between two markers; ``close`` may be empty.

    Args:
        keys: Keys of the name and the arguments.
        begin: A call in front of its arguments, if it has more than the two keys.
        before: White space after the opening marker, and in front of the first call.
        after: White space in front of the end of the list.
        between: Text between two calls.
    """
    name, arguments = keys
    lead, _, indent = before.partition("[")
    return ToolFormat(
        region_of(
            "json",
            f"{{{name}}}",
            f"{{{arguments}}}",
            open=opening,
            transform_each=True,
            **({"close": close} if close else {}),
        ),
        marks,
        grammar=ToolCallGrammar(
            opening,
            begin or f'{{"{name}": "{NAME}", "{arguments}": ',
            "}",
            between,
            f"{opening}{lead}[{indent}",
            f"{after}]{close}",
        ),
        **options,
    )


def named_json(
    begin: str,
    named: str,
    end: str,
    marks: tuple[tuple[str, ...], ...] = (),
    *,
    first: str = "",
    last: str = "",
    between: str = "",
    trigger: str = "",
    **options: Any,
) -> ToolFormat:
    """Calls with JSON arguments after the name: ``begin NAME named {...} end``.

    Args:
        begin: Text in front of the name; may have ``INDEX``.
        named: Text between the name and the arguments; may have ``INDEX``.
        first: Text in front of all calls.
        last: Text after all calls.
        trigger: Text that begins like this is a call. Default: ``first`` or ``begin``.
    """
    stop = named[:1]
    name = rf"[^{re.escape(stop)}\n]{{1,{LONGEST_NAME}}}" if stop else r"[\w.-]{1,256}"
    opening = f"{loose(begin)}(?P<name>{name}){loose(named)}(?=\\s{{0,{MOST_SPACE}}}\\{{)"
    if first:
        opening = f"(?:{loose(first)})?{opening}"
    close = {"close_pattern": loose(end) + maybe(last)}
    if not end.strip():
        close = {"close_pattern": f"(?={loose(begin)})"} if begin.strip() else {}
    return ToolFormat(
        region_of("json", "{name}", "{content}", open_pattern=opening, **close),
        marks,
        grammar=ToolCallGrammar(
            trigger or (first or begin).strip(), f"{begin}{NAME}{named}", end, between, first, last
        ),
        **options,
    )


def loose(text: str) -> str:
    """A pattern for a text whose white space is optional, also around it and between tags."""
    parts = re.split(r"(\s+|(?<=>)(?=<))", text)
    blank = rf"\s{{0,{MOST_SPACE}}}"
    pattern = "".join(blank if index % 2 else re.escape(part) for index, part in enumerate(parts))
    return pattern.replace(INDEX, r"[\w-]{1,64}").replace(TYPE, r"(?P<type>[a-z]{1,16})")


def maybe(text: str) -> str:
    """A pattern for a text that may follow, which no other text matches in part.

    An optional group would do, but a partial match of it counts as none.
    """
    if not text:
        return ""
    prefixes = [(re.escape(text[:index]), re.escape(char)) for index, char in enumerate(text)]
    others = (rf"{prefix}\Z|(?={prefix}[^{char}])" for prefix, char in prefixes)
    return rf"\s{{0,{MOST_SPACE}}}(?:{re.escape(text)}|{'|'.join(others)})"


def delimited(
    syntax: CallSyntax,
    opening: str,
    close: str,
    marks: tuple[tuple[str, ...], ...] = (),
    *,
    before: str = "",
    after: str = "",
    between: str = "",
    inside: bool = False,
    **options: Any,
) -> ToolFormat:
    """Calls in a syntax of their own between two markers; see :func:`json_objects`."""
    if isinstance(syntax, TagSyntax):
        begin, end = f"{syntax.begin}{NAME}{syntax.named}{syntax.gap}", syntax.end
    else:
        begin, end = f"{syntax.begin}{NAME}{syntax.open}", syntax.close
    return ToolFormat(
        {"repeats": True, "open": opening, "close": close},
        marks,
        grammar=_between(opening, close, begin, end, before, after, between, inside),
        syntax=syntax,
        **options,
    )


def _between(
    opening: str,
    close: str,
    begin: str,
    end: str,
    before: str,
    after: str,
    between: str,
    inside: bool,
) -> ToolCallGrammar:
    first, last = opening + before, after + close
    if inside:
        return ToolCallGrammar(opening, begin, end, between, first, last)
    return ToolCallGrammar(opening, first + begin, end + last, between)
