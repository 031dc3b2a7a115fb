"""Calls of tools, as they are written: the name as soon as it is there, then the arguments.

How a response template turns a region of text into a call says where in the text both stand; the
arguments come out verbatim. A region that says neither is read as a whole, when it closes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_cli.text.partial_json import JsonChunk, JsonValueStream, Path

_TAGS = (("<parameter=", "</parameter>"), ("<arg_value>", "</arg_value>"))
_MOST_UNCLOSED = 16
"""Arguments that are begun and not ended: for each, all of the text is searched for its end."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: its place among the answer's calls, its id, the function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments, which are JSON when all of them are there."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallShape:
    """Where the JSON of a region holds the calls.

    Attributes:
        name: the path to the function's name; a string: the name of the group of the opening
            pattern that caught it.
        arguments: the path to them; empty: they are all of the JSON.
        items: the JSON is a list of such.
    """

    name: Path | str
    arguments: Path
    items: bool


def shape_of(field: Any) -> ToolCallShape | None:
    """Of a field of a loaded response template; None where it is no plain JSON."""
    transform = field.transform
    if field.content != "json" or set(field.content_args) - {"allow_non_json"}:
        return None
    if not isinstance(transform, dict):
        return None
    function = transform.get("function", transform)
    if not isinstance(function, dict):
        return None
    groups = set(field.open_re.groupindex) if field.open_re is not None else set()
    name = _place(function.get("name"), groups, field.transform_each)
    arguments = _place(function.get("arguments"), set(), field.transform_each)
    if name is None or arguments is None or isinstance(arguments, str):
        return None
    return ToolCallShape(name, arguments, field.transform_each)


def _place(value: Any, groups: Collection[str], items: bool) -> Path | str | None:
    """Where a placeholder of a transform points."""
    if not isinstance(value, str) or not (value.startswith("{") and value.endswith("}")):
        return None
    root, *keys = value[1:-1].split(".")
    if root in groups:
        return root
    if items:
        return (root, *keys)
    return tuple(keys) if root == "content" else None


class ToolCallStream:
    """The calls of one region, while it is written.

    Numbers and ids are left to whoever knows the whole answer. ``began``: there has been a call;
    until then, the region may turn out to be something else.
    """

    def __init__(
        self,
        shape: ToolCallShape | None,
        captures: Mapping[str, str],
        names: Collection[str] | None = None,
    ) -> None:
        self._shape = shape
        self._names = names
        self._name = ""
        if shape is not None and isinstance(shape.name, str):
            self._name = captures.get(shape.name, "")
        self._members: JsonValueStream | None = None
        if shape is not None and (shape.arguments or not self._name):
            paths = [path for path in (shape.name, shape.arguments) if isinstance(path, tuple)]
            self._members = JsonValueStream(paths, shape.items)
        self._held = ""
        self._given = False
        self._spelled = ""
        self._quoted: str | None = None
        self._current = False
        self.began = False

    def begin(self) -> list[ToolCallStart | ToolCallArguments]:
        """What the opening of the region tells."""
        return self._begin(self._name) if self._name else []

    def push(self, text: str) -> list[ToolCallStart | ToolCallArguments]:
        """What more of the region tells."""
        if self._shape is None:
            return []
        if self._members is None:
            return self._add(text) if self._current else []
        found: list[ToolCallStart | ToolCallArguments] = []
        for part in self._members.push(text):
            found += self._part(part)
        return found

    def end(self) -> list[ToolCallStart | ToolCallArguments]:
        """What its end tells."""
        if self._members is None and self._current and not self._given:
            return [ToolCallArguments(0, "{}")]
        return []

    def _part(self, part: JsonChunk) -> list[ToolCallStart | ToolCallArguments]:
        assert self._shape is not None
        if part.path is None:
            return self._end_of_call()
        if part.path == self._shape.name:
            self._spelled += part.text
            if not part.complete:
                return []
            name = _decoded(self._spelled)
            if not name or (self._names is not None and name not in self._names):
                return []
            held, self._held = self._held, ""
            return [*self._begin(name), *self._add(held)]
        text = part.text
        if self._quoted is None and not self._given and not self._held and text[:1] == '"':
            self._quoted = ""  # arguments that are a string of JSON, as in OpenAI's own calls
        if self._quoted is not None:
            self._quoted += text
            if not part.complete:
                return []
            text = _decoded(self._quoted)
        if not self._current:
            self._held += text
            return []
        return self._add(text)

    def _begin(self, name: str) -> list[ToolCallStart | ToolCallArguments]:
        if self._current:
            return []
        self._current = self.began = True
        return [ToolCallStart(0, "", name)]

    def _add(self, text: str) -> list[ToolCallStart | ToolCallArguments]:
        """Arguments without the white space around them."""
        text = self._held + text
        if not self._given:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if not shown:
            return []
        self._given = True
        return [ToolCallArguments(0, shown)]

    def _end_of_call(self) -> list[ToolCallStart | ToolCallArguments]:
        found: list[ToolCallStart | ToolCallArguments] = []
        if self._current and not self._given:
            found.append(ToolCallArguments(0, "{}"))
        self._current = self._given = False
        self._held = self._spelled = ""
        self._quoted = None
        return found


def parse_tool_calls(
    template: Any,
    text: str,
    tools: Sequence[Mapping[str, Any]],
    names: Collection[str] | None = None,
) -> list[ToolCallStart | ToolCallArguments]:
    """The calls of a complete region as transformers reads it; none if it is no call."""
    from transformers.utils.chat_parsing import parse_response

    if any(text[text.rfind(close) :].count(opening) > _MOST_UNCLOSED for opening, close in _TAGS):
        return []
    try:
        message = parse_response(text, template, prefix="", tools=[dict(tool) for tool in tools])
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # the parser's ways to say that the text is not what the template describes
    calls = message.get("tool_calls") or []
    found: list[ToolCallStart | ToolCallArguments] = []
    for call in _flat(calls):
        function = call.get("function", call)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or (names is not None and name not in names):
            return []
        arguments = function.get("arguments", {})
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        found += [ToolCallStart(0, "", name), ToolCallArguments(0, text)]
    return found


def _flat(calls: Any) -> list[dict[str, Any]]:
    """Calls out of lists of lists of them."""
    if isinstance(calls, list):
        return [call for item in calls for call in _flat(item)]
    return [calls] if isinstance(calls, dict) else []


def _decoded(text: str) -> str:
    """The string that a JSON literal spells; empty if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
