"""Parses calls that are JSON while they are generated: the arguments are passed on verbatim.

The transform in a response template defines where in a region's text both are. If it does not,
the whole region is parsed when it closes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_cli.text.formats.calls import ToolCallArguments, ToolCallPart, ToolCallStart
from tgi_cli.text.partial_json import JsonChunk, JsonValueStream, Path

_TAGS = (("<parameter=", "</parameter>"), ("<arg_value>", "</arg_value>"))
_MOST_UNCLOSED = 16
"""Most arguments that are opened and not closed: each costs a search of the whole text."""


@dataclass(frozen=True, slots=True)
class ToolCallShape:
    """Where the JSON of a region holds the tool calls.

    Attributes:
        name: Path to the function's name, or the group of the opening pattern that matched it.
        arguments: Path to the arguments; empty if they are the whole JSON.
        items: The JSON is a list of calls.
    """

    name: Path | str
    arguments: Path
    items: bool


def shape_of(field: Any) -> ToolCallShape | None:
    """The shape of a field of a loaded response template, or None if it is not plain JSON."""
    transform = field.transform
    if field.content != "json" or set(field.content_args) - {"allow_non_json"}:
        return None
    if not isinstance(transform, dict):
        return None
    function = transform.get("function", transform)
    if not isinstance(function, dict):
        return None
    groups = set(field.open_re.groupindex) if field.open_re is not None else set()
    name = _source(function.get("name"), groups, field.transform_each)
    arguments = _source(function.get("arguments"), set(), field.transform_each)
    if name is None or arguments is None or isinstance(arguments, str):
        return None
    return ToolCallShape(name, arguments, field.transform_each)


def _source(value: Any, groups: Collection[str], items: bool) -> Path | str | None:
    """The path or the group that a placeholder of a transform refers to."""
    if not isinstance(value, str) or not (value.startswith("{") and value.endswith("}")):
        return None
    root, *keys = value[1:-1].split(".")
    if root in groups:
        return root
    if items:
        return (root, *keys)
    return tuple(keys) if root == "content" else None


class JsonCallStream:
    """The calls of one region; see :class:`~tgi_cli.text.formats.calls.CallStream`."""

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
        self.began = self.failed = False

    def begin(self) -> list[ToolCallPart]:
        return self._begin(self._name) if self._name else []

    def push(self, text: str) -> list[ToolCallPart]:
        if self._shape is None:
            return []
        if self._members is None:
            return self._add(text) if self._current else []
        found: list[ToolCallPart] = []
        for chunk in self._members.push(text):
            found += self._chunk(chunk)
        return found

    def end(self, closed: bool) -> list[ToolCallPart]:
        if self._members is None and self._current and not self._given:
            return [ToolCallArguments(0, "{}")]
        return []

    def _chunk(self, chunk: JsonChunk) -> list[ToolCallPart]:
        assert self._shape is not None
        if chunk.path is None:
            return self._end_of_call()
        if chunk.path == self._shape.name:
            self._spelled += chunk.text
            if not chunk.complete:
                return []
            name = _decoded(self._spelled)
            if not name or (self._names is not None and name not in self._names):
                return []
            held, self._held = self._held, ""
            return [*self._begin(name), *self._add(held)]
        text = chunk.text
        if self._quoted is None and not self._given and not self._held and text[:1] == '"':
            self._quoted = ""  # the arguments are a string with JSON in it, as in OpenAI's API
        if self._quoted is not None:
            self._quoted += text
            if not chunk.complete:
                return []
            text = _decoded(self._quoted)
        if not self._current:
            self._held += text
            return []
        return self._add(text)

    def _begin(self, name: str) -> list[ToolCallPart]:
        if self._current:
            return []
        self._current = self.began = True
        return [ToolCallStart(0, "", name)]

    def _add(self, text: str) -> list[ToolCallPart]:
        """More arguments, without surrounding white space."""
        text = self._held + text
        if not self._given:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if not shown:
            return []
        self._given = True
        return [ToolCallArguments(0, shown)]

    def _end_of_call(self) -> list[ToolCallPart]:
        found: list[ToolCallPart] = []
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
) -> list[ToolCallPart]:
    """The calls in a complete region, as transformers parses it; empty if it is not a call."""
    from transformers.utils.chat_parsing import parse_response

    if any(text[text.rfind(close) :].count(opening) > _MOST_UNCLOSED for opening, close in _TAGS):
        return []
    try:
        message = parse_response(text, template, prefix="", tools=[dict(tool) for tool in tools])
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # what the parser raises if the text does not match the template
    calls = message.get("tool_calls") or []
    found: list[ToolCallPart] = []
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
    """Calls in nested lists."""
    if isinstance(calls, list):
        return [call for item in calls for call in _flat(item)]
    return [calls] if isinstance(calls, dict) else []


def _decoded(text: str) -> str:
    """The value of a JSON string literal; empty if it is invalid."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
