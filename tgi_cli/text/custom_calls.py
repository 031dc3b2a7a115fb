"""Calls of tools that take free text: from ``{"input": TEXT}`` to the text, while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from tgi_cli.text.formats.calls import ToolCallArguments, ToolCallStart
from tgi_cli.text.partial_json import JsonValueStream
from tgi_cli.text.response_parser import ResponsePart

_INPUT = ("input",)
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
)
"""Whole characters of a JSON string: none of them continues in the text that follows."""

_PART = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?"
)
"""The beginning of a character that is escaped."""


class ResponseReader(Protocol):
    """Parses a response while it is generated."""

    @property
    def calls(self) -> int:
        """Number of tool calls so far."""
        ...

    def push(self, text: str) -> list[ResponsePart]:
        """Parse more text."""
        ...

    def finish(self, cut_off: bool = False) -> list[ResponsePart]:
        """Parse the end; ``cut_off``: the response has reached its length."""
        ...


class CustomCallReader:
    """Gives the calls of custom tools with their text instead of JSON; other parts as they are.

    Args:
        reader: Parses the response.
        names: Names of the custom tools.
    """

    def __init__(self, reader: ResponseReader, names: Collection[str]) -> None:
        self._reader = reader
        self._names = names
        self._open: tuple[int, CustomInput] | None = None

    @property
    def calls(self) -> int:
        """See :class:`ResponseReader`."""
        return self._reader.calls

    def push(self, text: str) -> list[ResponsePart]:
        """See :class:`ResponseReader`."""
        return self._read(self._reader.push(text))

    def finish(self, cut_off: bool = False) -> list[ResponsePart]:
        """See :class:`ResponseReader`."""
        return [*self._read(self._reader.finish(cut_off)), *self._close()]

    def _read(self, parts: Sequence[ResponsePart]) -> list[ResponsePart]:
        found: list[ResponsePart] = []
        for part in parts:
            if isinstance(part, ToolCallArguments) and self._open is not None:
                text = self._open[1].push(part.text)
                if text:
                    found.append(replace(part, text=text, custom=True))
                continue
            found += self._close()
            if isinstance(part, ToolCallStart) and part.name in self._names:
                self._open = part.index, CustomInput()
                part = replace(part, custom=True)
            found.append(part)
        return found

    def _close(self) -> list[ResponsePart]:
        """The rest of the open call."""
        if self._open is None:
            return []
        (index, text), self._open = self._open, None
        rest = text.finish()
        return [ToolCallArguments(index, rest, custom=True)] if rest else []


class CustomInput:
    """The text in the arguments ``{"input": TEXT}``, as they arrive.

    Arguments of another form, which models write if nothing constrains them, are the text.
    """

    def __init__(self) -> None:
        self._values = JsonValueStream([_INPUT])
        self._arguments: list[str] = []
        self._spelled = ""
        """JSON of the text that is not decoded yet."""
        self._begun = self._ended = False

    def push(self, arguments: str) -> str:
        """The text in more of the arguments."""
        if self._ended:
            return ""
        if not self._begun:
            self._arguments.append(arguments)
        for chunk in self._values.push(arguments):
            if chunk.path != _INPUT:
                continue
            self._spelled += chunk.text
            if not self._begun:
                if not self._spelled.startswith('"'):
                    self._ended = chunk.complete
                    self._spelled = ""
                    continue
                self._begun, self._spelled = True, self._spelled[1:]
            self._ended = chunk.complete
        return self._decoded()

    def finish(self) -> str:
        """The rest of the text; a character of which only a part has come is left out."""
        if not self._begun:
            return "".join(self._arguments)
        return "" if _PART.fullmatch(self._spelled) else self._spelled

    def _decoded(self) -> str:
        if not self._begun:
            return ""
        match = _WHOLE.match(self._spelled)
        end = match.end() if match else 0
        whole, self._spelled = self._spelled[:end], self._spelled[end:]
        if self._ended:
            rest = self._spelled.removesuffix('"')
            self._spelled = ""
            return _text(whole) + rest
        return _text(whole)


def _text(spelled: str) -> str:
    """The text of whole characters of a JSON string."""
    found: str = json.loads(f'"{spelled}"', strict=False)
    return found
