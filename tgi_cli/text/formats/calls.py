"""What parsers of tool calls produce: first the name, then the arguments as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from tgi_cli.text.formats.values import ParameterTypes

AT_ONCE = 4096
"""Most characters that a parser takes at once: each part that it finds copies the rest of them."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call: its index in the response, its id, the function's name.

    Attributes:
        custom: The tool takes text, which follows instead of JSON.
    """

    index: int
    id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; joined, they are JSON, or the text of a custom tool."""

    index: int
    text: str
    custom: bool = False


ToolCallPart = ToolCallStart | ToolCallArguments


class CallStream(Protocol):
    """Parses the calls of one region while it is generated. Its user sets indices and ids.

    The joined parts do not depend on how the text was split.

    Attributes:
        began: There has been a call; until then, the region may turn out to be content.
        failed: There is no call in the region, whatever follows.
    """

    began: bool
    failed: bool

    def begin(self) -> list[ToolCallPart]:
        """The parts in the opening of the region."""

    def push(self, text: str) -> list[ToolCallPart]:
        """The parts in more text of the region."""

    def end(self, closed: bool) -> list[ToolCallPart]:
        """The parts at the end of the region; unless it was ``closed``, the text is cut off."""


class TextCallStream:
    """A :class:`CallStream` over the text of a region, a state machine.

    Subclasses set ``_next`` to what reads the rest ``_text``; it returns whether it got further.
    """

    _next: Callable[[list[ToolCallPart]], bool]

    def __init__(self, types: ParameterTypes, names: Collection[str] | None) -> None:
        self._types, self._names = types, names
        self._text = self._function = ""
        self._members = Members()
        self.began = self.failed = False

    def begin(self) -> list[ToolCallPart]:
        return []

    def push(self, text: str) -> list[ToolCallPart]:
        found: list[ToolCallPart] = []
        for start in range(0, len(text), AT_ONCE):
            self._text += text[start : start + AT_ONCE]
            while not self.failed and self._next(found):
                pass
        return found

    def end(self, closed: bool) -> list[ToolCallPart]:
        return []


class Members:
    """Writes the arguments of one call as a JSON object, member by member."""

    def __init__(self) -> None:
        self._any = False

    def key(self, literal: str) -> ToolCallArguments:
        """Begin the member whose key has this JSON."""
        lead = ", " if self._any else "{"
        self._any = True
        return ToolCallArguments(0, f"{lead}{literal}: ")

    def close(self) -> ToolCallArguments:
        """End the object."""
        return ToolCallArguments(0, "}" if self._any else "{}")


def pending(text: str, mark: str) -> int:
    """Length of the end of a text with which ``mark`` may begin."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
