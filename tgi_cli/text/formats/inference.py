"""Infers the format of tool calls from what a chat template writes for a probe.

The texts around names, keys and values are the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tgi_cli.text.formats.probe import (
    ARGUMENTS,
    LONGEST_MARK,
    NAMES,
    NUMBER,
    TEXT,
    Probe,
    blank_end,
    blank_start,
    common_prefix,
    common_suffix,
    tokens_of,
)
from tgi_cli.text.formats.syntax import (
    INDEX,
    LONGEST_NAME,
    NAME,
    TYPE,
    LiteralSyntax,
    TagSyntax,
    ToolCallGrammar,
    ToolFormat,
    delimited,
    json_list,
    json_objects,
    loose,
    named_json,
)

_OBJECT = re.compile(r'\{\s*(?:"\w+"\s*:\s*"[^"]*"\s*,\s*)*"(?P<key>\w+)"\s*:\s*"$')
_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")


def infer_tool_format(probe: Probe) -> ToolFormat | None:
    """The format of the calls in a probe, or None if it is unlike any that is known."""
    for infer in (_json, _literals, _named_json, _tags):
        found = infer(probe)
        if found is not None:
            return found
    return None


def _json(probe: Probe) -> ToolFormat | None:
    """Calls that are JSON objects with the name in them."""
    match = _OBJECT.search(probe.head)
    if match is None:
        return None
    written = probe.head[match.start() :] + NAMES[0] + probe.body
    value, end = _decoded(written)
    if not isinstance(value, dict) or end < 0:
        return None
    arguments = [key for key, each in value.items() if each == ARGUMENTS]
    if len(arguments) != 1:
        return None
    keys = match["key"], arguments[0]
    end -= len(written) - len(probe.body)
    lead = probe.head[: match.start()]
    rest, between = probe.rest(end), probe.between(end)
    begin = probe.head[match.start() :] + NAME + f'", "{arguments[0]}": '
    begin = re.sub(r'": "\d+", ', f'": "{INDEX}", ', begin)
    if lead.rstrip().endswith("["):
        opening, before = blank_end(lead[: lead.rindex("[")])
        before += lead[lead.rindex("[") :]
        after, _, close = rest.partition("]")
        separator = between[: between.rindex("{")] if between and "{" in between else ", "
        usual = f'{{"{keys[0]}": "{NAME}", "{keys[1]}": '
        found = json_list(
            opening,
            close.strip(),
            keys=keys,
            begin="" if begin == usual else begin,
            before=before,
            after=after,
            between=separator,
        )
        return found if opening else _bare_list(found, keys[0])
    opening, before = blank_end(lead)
    after, close = blank_start(rest)
    if not opening:
        return _bare_object(keys)
    inside = between is not None and opening not in between
    separator = "\n"
    if between is not None and inside:
        separator = between[: between.rindex("{")] if "{" in between else "\n"
    elif between is not None:
        separator = between[len(rest) : between.rindex(opening)]
    return json_objects(
        opening, close, keys=keys, before=before, after=after, between=separator, inside=inside
    )


def _decoded(text: str) -> tuple[Any, int]:
    """The JSON value that a text begins with, and its end; -1 if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None, -1


def _bare_list(form: ToolFormat, key: str) -> ToolFormat:
    """A JSON list without a mark in front of it, which is the whole response."""
    region = {name: value for name, value in form.region.items() if name not in ("open", "close")}
    region["open_pattern"] = rf'\A\s{{0,64}}(?=\[\s{{0,64}}\{{\s{{0,64}}"{key}"\s{{0,8}}:)'
    assert form.grammar is not None
    return replace(form, region=region, bare=True, grammar=replace(form.grammar, trigger=""))


def _bare_object(keys: tuple[str, str]) -> ToolFormat:
    """A JSON object without a mark in front of it, which is the whole response."""
    form = json_objects("", "", keys=keys)
    region = {name: value for name, value in form.region.items() if name != "open"}
    region["open_pattern"] = rf'\A\s{{0,64}}(?=\{{\s{{0,64}}"{keys[0]}"\s{{0,8}}:)'
    assert form.grammar is not None
    return replace(form, region=region, bare=True, grammar=replace(form.grammar, single=True))


def _named_json(probe: Probe) -> ToolFormat | None:
    """Calls with JSON arguments after the name."""
    brace = probe.body.find("{")
    key = probe.body.find('"key_one"')
    if brace < 0 or not 0 <= key - brace < LONGEST_MARK:
        return None
    value, length = _decoded(probe.body[brace:])
    if value != ARGUMENTS:
        return None
    named, end = probe.body[:brace], brace + length
    head, rest, between = probe.head, probe.rest(end), probe.between(end)
    if head.endswith('{"') and named.lstrip().startswith('"'):
        return _name_as_key(head, rest)
    if not head.strip() and not named.strip():
        return None
    begin, first, last, separator, closing = head, "", "", "", rest
    if between is not None:
        begin = common_suffix(_indexed(head), _indexed(between))
        first = _indexed(head)[: len(_indexed(head)) - len(begin)]
        blank, begin = blank_start(begin)
        first += blank if first else ""
        gap = _indexed(between)[: len(_indexed(between)) - len(begin)]
        closing = common_prefix(gap, rest)
        separator, last = gap[len(closing) :], rest[len(closing) :]
        if not separator:
            closing, separator = blank_end(closing)
            last = rest[len(closing) :]
    named = re.sub(r"\d+", INDEX, named) if re.search(r"\d", named) else named
    begin = begin.replace("Probe0000", INDEX).replace("Probe000INDEX", INDEX)
    return named_json(begin, named, closing, first=first, last=last, between=separator)


def _indexed(text: str) -> str:
    """A text with numbers and ids of calls replaced."""
    return re.sub(r"Probe000\d", INDEX, text)


def _name_as_key(head: str, rest: str) -> ToolFormat | None:
    """A list of objects, in which the name is the key of the arguments."""
    opening, bracket, inner = head.rpartition("[")
    if inner.strip() != '{"' or not opening.strip():
        return None
    close = rest.partition("]")[2].strip()
    opening = opening.strip()
    return ToolFormat(
        {"repeats": True, "open": opening, "close": close},
        grammar=ToolCallGrammar(
            opening, f'{{"{NAME}": ', "}", ", ", opening + bracket, "]" + close
        ),
        syntax=LiteralSyntax('{"', '": {', ":", "}", json=True),
    )


def _literals(probe: Probe) -> ToolFormat | None:
    """Calls with literals as arguments."""
    opened = re.match(
        r"(?P<open>[({])\s*key_one\s*(?P<equals>[:=])\s*(?P<quote>\S+?)Probe", probe.body
    )
    if opened is None:
        return None
    close = ")" if opened["open"] == "(" else "}"
    number = probe.body.find(str(NUMBER))
    end = probe.body.find(close, number) + 1
    if number < 0 or not end:
        return None
    quote = "" if opened["quote"] in ("'", '"') else opened["quote"]
    python = not quote and "=True" in probe.body[:end]
    tokens = tokens_of(probe.head)
    opening = tokens[0] if tokens and tokens[0].startswith("<") else ""
    inner = probe.head[len(opening) :]
    begin = inner.strip().lstrip("[").strip()
    before = inner[: len(inner) - len(begin)] if begin else inner
    syntax = LiteralSyntax(begin, opened["open"], opened["equals"], close, quote, python)
    rest, between = probe.rest(end), probe.between(end)
    if not opening:
        return _bare_calls(syntax) if before.strip() == "[" else None
    tail = tokens_of(rest)
    closing = tail[-1] if tail and tail[-1].startswith("<") else ""
    after = rest[: len(rest) - len(closing)]
    inside = between is not None and opening not in between
    separator = between or ""
    if between is not None and inside:
        separator = between[: len(between) - len(begin)]
    elif between is not None:
        separator = between[len(rest) : between.rindex(opening)]
    return delimited(
        syntax,
        opening,
        closing,
        before=before,
        after=after,
        between=separator,
        inside=inside or bool(before.strip()),
    )


def _bare_calls(syntax: LiteralSyntax) -> ToolFormat:
    """A list of calls without a mark in front of it, which is the whole response."""
    return ToolFormat(
        {
            "repeats": True,
            "open_pattern": r"\A\s{0,64}(?=\[\s{0,64}[A-Za-z_][\w.-]{0,255}\()",
        },
        bare=True,
        grammar=ToolCallGrammar("", f"{NAME}(", ")", ", ", "[", "]"),
        syntax=syntax,
    )


def _tags(probe: Probe) -> ToolFormat | None:
    """Calls with tagged arguments."""
    body = probe.body
    places: list[tuple[int, int]] = []
    at = 0
    for text in ("key_one", TEXT, "key_three", "rue", "key_two", str(NUMBER)):
        found = body.find(text, at)
        if found < 0:
            return None
        at = found + len(text)
        places.append((found - (text == "rue"), at))
    texts = [body[left[1] : right[0]] for left, right in pairwise(places)]
    lead, values, gaps = body[: places[0][0]], texts[::2], texts[1::2]
    if gaps[0] != gaps[1] or not gaps[0].strip() or not values[0].strip():
        return None
    key = common_suffix(lead, gaps[0])
    if not key.strip():
        return None
    named, close = lead[: len(lead) - len(key)], gaps[0][: len(gaps[0]) - len(key)]
    gap, key = blank_start(key)
    value = _typed(values)
    if value is None:
        return None
    opened, types = value
    pad = ""
    opened_bare, blank = blank_end(opened)
    if blank and close.startswith(blank):
        opened, pad, close = opened_bare, blank, close[len(blank) :]
    end = places[-1][1] + len(pad + close + gap)
    rest, between = probe.rest(end), probe.between(end)
    if rest is None or body[places[-1][1] : end] != pad + close + gap:
        return None
    syntax = TagSyntax("", named, key, opened, close, gap=gap, pad=pad, types=types)
    return _enclosed(syntax, probe.head, rest, between)


def _typed(values: Sequence[str]) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """The text between keys and values, and what it says of types; None if it says anything else.

    Args:
        values: The texts in front of a string, a boolean and a number.
    """
    string, boolean, number = values
    if string == boolean == number:
        return string, ()
    words = [re.findall(r'"(\w+)"', text) for text in values]
    patterns = {re.sub(r'"\w+"', f'"{TYPE}"', text) for text in values}
    if len(patterns) != 1 or any(len(each) != 1 for each in words):
        return None
    (told,), (told_boolean,), (told_number,) = words
    names = dict.fromkeys(_TYPES, told_number) | {"string": told, "boolean": told_boolean}
    if told_boolean != told_number:
        names |= {name: name for name in ("object", "array", "null")}
        if told_number not in ("number", "integer"):
            return None
    return patterns.pop(), tuple(names.items())


def _enclosed(syntax: TagSyntax, head: str, rest: str, between: str | None) -> ToolFormat | None:
    """The format of calls in a syntax, with what is around all calls, or around each."""
    if between is None:
        between, first, begin, ending, separator = "", "", head, rest, "\n"
    else:
        begin = common_suffix(head, between)
        first = head[: len(head) - len(begin)]
        blank, begin = blank_start(begin)
        first += blank if first else ""
        gap = between[: len(between) - len(begin)]
        ending = common_prefix(gap, rest)
        separator = gap[len(ending) :]
        if not separator:
            ending, separator = blank_end(ending)
    if first:
        opening, before = blank_end(first)
        after, closing = blank_start(rest[len(ending) :])
        if not opening or not closing:
            return None
        form = delimited(
            replace(syntax, begin=begin, end=ending),
            opening,
            closing,
            before=before,
            after=after,
            between=separator,
            inside=True,
        )
        return form
    marks, ends = tokens_of(begin), tokens_of(ending)
    if not marks or not ends:
        return None
    if not marks[0].endswith(">"):  # the name is within the first mark
        syntax = replace(syntax, begin=begin)
        pattern = f"(?={loose(begin)}[^\\n]{{1,{LONGEST_NAME}}}?{loose(syntax.named)})"
        grammar = ToolCallGrammar(
            begin, f"{begin}{NAME}{syntax.named}{syntax.gap}", ending, separator
        )
        region = {"repeats": True, "open_pattern": pattern, "close": ending.strip()}
        return ToolFormat(region, grammar=grammar, syntax=syntax)
    before, inner = blank_start(begin[len(marks[0]) :])
    end, after = blank_end(ending[: len(ending) - len(ends[-1])])
    return delimited(
        replace(syntax, begin=inner, end=end),
        marks[0],
        ends[-1],
        before=before,
        after=after,
        between=separator,
    )
