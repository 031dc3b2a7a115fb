"""Parses a response while it is generated: content, reasoning and tool calls.

transformers' response parser (``transformers.utils.chat_parsing``) finds the regions of the text;
the inside of a tool call is passed on verbatim, so that its arguments can be streamed. Nothing is
lost: a region that opens like a call but is not one becomes content.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tgi_cli.text.formats.calls import CallStream, ToolCallPart, ToolCallStart
from tgi_cli.text.formats.json_calls import ToolCallShape, parse_tool_calls
from tgi_cli.text.formats.read import call_stream
from tgi_cli.text.formats.reasoning import REASONING_FIELDS
from tgi_cli.text.formats.syntax import ToolFormat
from tgi_cli.text.formats.values import ParameterTypes

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


ResponsePart = Content | Reasoning | ToolCallPart


@dataclass(slots=True)
class ParsedResponse:
    """A whole response."""

    content: str
    reasoning: str
    calls: list[ToolCallStart]
    arguments: list[str]

    @classmethod
    def of(cls, pieces: Sequence[ResponsePart]) -> ParsedResponse:
        """Join the parts of a response."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCallStart] = []
        arguments: list[list[str]] = []
        for piece in pieces:
            if isinstance(piece, Content):
                content.append(piece.text)
            elif isinstance(piece, Reasoning):
                reasoning.append(piece.text)
            elif isinstance(piece, ToolCallStart):
                calls.append(piece)
                arguments.append([])
            else:
                arguments[piece.index].append(piece.text)
        return cls("".join(content), "".join(reasoning), calls, ["".join(a) for a in arguments])


class _TrimmedText:
    """Text of one kind without white space at the borders of regions."""

    def __init__(self) -> None:
        self.held = ""
        self.trims = False
        self._joint = ""
        self._given = False

    def push(self, text: str) -> str:
        """Add text. Returns what can be shown; trailing white space is held back."""
        text = self.held + text
        if self.trims:
            text = text.lstrip()
        shown = text.rstrip()
        self.held = text[len(shown) :]
        if not shown:
            return ""
        joint, self._joint = self._joint, ""
        self.trims, self._given = False, True
        return joint + shown

    def cut(self, joint: str = "") -> None:
        """Mark the border of a region; ``joint`` separates the text on both sides."""
        self.held, self.trims = "", True
        self._joint = joint if self._given else ""

    def forget(self) -> None:
        """Drop the text so far: it belongs to the prompt."""
        self.held, self._joint, self._given = "", "", False


@dataclass(frozen=True, slots=True)
class ResponseTemplates:
    """The response templates of one model, loaded by transformers.

    Attributes:
        every: all regions.
        without_tools: all regions but tool calls, or None if there are no others.
        tool_calls: the region of one call, or None if the syntax of calls is unknown.
        shape: where a call holds its name and arguments, or None if not as plain JSON.
    """

    every: Any
    without_tools: Any
    tool_calls: Any
    shape: ToolCallShape | None


class ResponseParser:
    """Parses one response as it is generated.

    The joined parts do not depend on how the text was split. White space around regions is
    dropped; a response without regions stays as it is.

    Args:
        templates: Response templates of the model.
        tool_format: Format of its tool calls, or None if its own template defines it.
        prefix: End of the prompt that belongs to the response.
        tools: Tools that may be called.
        parallel: Whether to return more than the first tool call.

    Attributes:
        calls: Number of tool calls so far.
    """

    def __init__(
        self,
        templates: ResponseTemplates,
        tool_format: ToolFormat | None,
        prefix: str,
        tools: Sequence[Mapping[str, Any]],
        parallel: bool,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser as TemplateParser

        template = templates.every if tools else templates.without_tools
        self._templates = templates
        self._fields = template.fields
        self._id_length = tool_format.id_length if tool_format else 0
        self._id = ""
        self._syntax = tool_format.syntax if tool_format else None
        self._types = ParameterTypes(tools)
        self._tools = [dict(tool) for tool in tools]
        self._names: frozenset[str] | None = None
        if tool_format and tool_format.bare:
            self._names = frozenset(str(tool["function"]["name"]) for tool in self._tools)
        self._most = None if parallel else 1
        self.calls = 0
        self._raw = prefix
        """Text that is in no event yet: markers and their possible beginnings."""
        self._region = ""
        """Text of the current tool call, with its markers."""
        self._call: CallStream | None = None
        self._content, self._reasoning = _TrimmedText(), _TrimmedText()
        self._parser = TemplateParser(template, prefix=prefix)
        for event in self._parser.initial_events:
            self._pieces(event)
        self._content.forget()
        self._reasoning.forget()

    def push(self, text: str) -> list[ResponsePart]:
        """Parse more text."""
        self._raw += text
        return [piece for event in self._parser.feed(text) for piece in self._pieces(event)]

    def finish(self, cut_off: bool = False) -> list[ResponsePart]:
        """Parse the end.

        If the response was ``cut_off`` after a tool call, the beginning of another one is not
        content.
        """
        called = self.calls > 0
        _, events = self._parser.finalize()
        pieces = [piece for event in events for piece in self._pieces(event)]
        if cut_off and called:
            return [piece for piece in pieces if not isinstance(piece, Content)]
        if self._content.held and not self._content.trims:
            pieces.append(Content(self._content.held))
        return pieces

    def _pieces(self, event: Mapping[str, Any]) -> list[ResponsePart]:
        name = event["field"]
        if event["type"] == "region_open":
            return self._opened(name)
        if event["type"] == "region_close":
            return self._closed(name)
        text = event["text"]
        self._leave(text)
        if self._call is not None:
            self._region += text
            found = self._numbered(self._call.push(text))
            return self._given_up() if self._call.failed else found
        if name in ("content", "tool_calls"):
            return self._answer(text)
        shown = self._reasoning.push(text) if name in REASONING_FIELDS else ""
        return [Reasoning(shown)] if shown else []

    def _opened(self, name: str) -> list[ResponsePart]:
        pattern = self._fields[name].open_re
        if pattern is None:
            return []
        self._content.cut("\n" if name == "content" else "")
        if name in REASONING_FIELDS:
            self._reasoning.cut("\n")
        match = pattern.search(self._raw)
        captures: dict[str, str] = {}
        if match is not None:
            captures = {key: text for key, text in match.groupdict().items() if text is not None}
            self._region = match.group()
            self._raw = self._raw[match.end() :]
        if name != "tool_calls":
            return []
        self._id = captures.get("id", "")
        self._call = call_stream(
            self._syntax, self._templates.shape, self._types, captures, self._names
        )
        return self._numbered(self._call.begin())

    def _given_up(self) -> list[ResponsePart]:
        """The region so far, which has no call: it and what follows in it are content."""
        self._call = None
        region, self._region = self._region, ""
        return self._answer(region)

    def _closed(self, name: str) -> list[ResponsePart]:
        field = self._fields[name]
        closed, mark = field.close_re is None, ""
        if field.open_re is not None and field.close_re is not None:
            match = field.close_re.match(self._raw)
            if match is not None:
                closed, mark = True, match.group()
                self._raw = self._raw[match.end() :]
        if name in REASONING_FIELDS:
            self._reasoning.cut()
        call, self._call = self._call, None
        if call is None:
            return self._answer(mark) if name == "tool_calls" else []
        self._region += mark
        ended = self._numbered(call.end(closed))
        if call.began:
            return ended
        if self._syntax is not None:
            return self._answer(self._region)
        found = parse_tool_calls(self._templates.tool_calls, self._region, self._tools, self._names)
        return self._numbered(found) if found else self._answer(self._region)

    def _leave(self, text: str) -> None:
        """Drop the text of an event, and all before it."""
        start = 0 if self._raw.startswith(text) else max(self._raw.find(text), 0)
        self._raw = self._raw[start + len(text) :]

    def _answer(self, text: str) -> list[ResponsePart]:
        shown = self._content.push(text)
        return [Content(shown)] if shown else []

    def _numbered(self, pieces: Sequence[ToolCallPart]) -> list[ResponsePart]:
        """Calls with their index and id in the response, without those beyond the limit."""
        found: list[ResponsePart] = []
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                self.calls += 1
            if self._most is not None and self.calls > self._most:
                continue
            if isinstance(piece, ToolCallStart):
                piece = replace(piece, id=self._new_id())
            found.append(replace(piece, index=self.calls - 1))
        return found

    def _new_id(self) -> str:
        """An id for a call, in the form that the model's chat template expects."""
        if self._id:
            given, self._id = self._id, ""
            return given
        if self._id_length:
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self._id_length))
        return "call_" + secrets.token_hex(12)
