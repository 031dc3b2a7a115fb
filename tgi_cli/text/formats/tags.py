"""Parses calls whose arguments are tagged values, such as ``<parameter=city>Rome</parameter>``.

Strings are passed on while they are generated; other values when they are complete, converted to
JSON by the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import lru_cache

from tgi_cli.text.formats.calls import (
    Members,
    TextCallStream,
    ToolCallArguments,
    ToolCallPart,
    ToolCallStart,
    pending,
)
from tgi_cli.text.formats.syntax import LONGEST_NAME, MOST_SPACE, TagSyntax, loose
from tgi_cli.text.formats.values import STRING, ParameterTypes, to_json

_CDATA = ("<![CDATA[", "]]>")
_LONGEST_HEAD = 1024
"""Most characters of what opens a call or an argument: a longer text is none."""


_FIRST_WORD = re.compile(rf"[^<\s]{{1,{LONGEST_NAME}}}")


@lru_cache(maxsize=256)
def _head(before: str, group: str, after: str) -> re.Pattern[str]:
    """``before``, a name and ``after``."""
    stop = after.lstrip()[:1]
    name = f"[^{re.escape(stop)}\\n]" if stop else r"[^<\s]"
    pattern = (
        f"{loose(before.lstrip())}(?P<{group}>{name}{{1,{LONGEST_NAME}}}){loose(after.rstrip())}"
    )
    return re.compile(pattern)


class TagStream(TextCallStream):
    """The calls of one region; see :class:`~tgi_cli.text.formats.calls.CallStream`."""

    def __init__(
        self, syntax: TagSyntax, types: ParameterTypes, names: Collection[str] | None = None
    ) -> None:
        super().__init__(types, names)
        self._syntax = syntax
        self._call = _head(syntax.begin, "name", syntax.named)
        self._argument = _head(syntax.key, "key", syntax.value)
        self._begin = syntax.begin.strip()
        self._key = syntax.key.strip()
        self._end = syntax.end.strip()
        self._next = self._name if self._begin else self._word
        self._value_types: frozenset[str] | None = None
        self._streams = self._opened = False
        self._close = syntax.close
        self._searched = 0

    def end(self, closed: bool) -> list[ToolCallPart]:
        found: list[ToolCallPart] = []
        if self._next == self._word and closed:
            name = self._text.strip()
            if _FIRST_WORD.fullmatch(name) and self._starts(name, found):
                found.append(self._members.close())
        elif self._next == self._arguments and closed:
            found.append(self._members.close())
        return found

    def _starts(self, name: str, found: list[ToolCallPart]) -> bool:
        """Begin a call. Returns False if there is no such function."""
        if self._names is not None and name not in self._names:
            return False
        self._function, self._members = name, Members()
        self.began = True
        found.append(ToolCallStart(0, "", name))
        return True

    def _word(self, found: list[ToolCallPart]) -> bool:
        """The region's first word, which is a name if an argument follows."""
        text = self._text.lstrip()
        match = _FIRST_WORD.match(text)
        if match is None or match.end() == len(text):
            self.failed = (
                len(self._text) - len(text) > MOST_SPACE
                or (bool(text) and match is None)
                or len(text) >= LONGEST_NAME
            )
            return False
        rest = text[match.end() :].lstrip()
        if not rest.startswith(self._key):
            self.failed = not self._key.startswith(rest)
            return False
        self.failed = not self._starts(match.group(), found)
        self._text, self._next = rest, self._arguments
        return True

    def _name(self, found: list[ToolCallPart]) -> bool:
        """Text in front of a call."""
        index = self._text.find(self._begin)
        if index < 0:
            kept = pending(self._text, self._begin)
            self._text = self._text[len(self._text) - kept :]
            return False
        self._text = self._text[index:]
        match = self._call.match(self._text)
        if match is None and len(self._text) <= _LONGEST_HEAD:
            return False
        if match is None or not self._starts(match["name"].strip(), found):
            self._text = self._text[len(self._begin) :]
            return True
        self._text, self._next = self._text[match.end() :], self._arguments
        return True

    def _arguments(self, found: list[ToolCallPart]) -> bool:
        """Text after the name, or after an argument."""
        key = self._text.find(self._key)
        end = self._text.find(self._end) if self._end else -1
        if end >= 0 and (key < 0 or end < key):
            found.append(self._members.close())
            self._text, self._next = self._text[end + len(self._end) :], self._name
            return True
        if key < 0:
            kept = max(pending(self._text, self._key), pending(self._text, self._end or " "))
            self._text = self._text[len(self._text) - kept :]
            return False
        self._text = self._text[key:]
        match = self._argument.match(self._text)
        if match is None:
            if len(self._text) > _LONGEST_HEAD:
                self._text = self._text[len(self._key) :]
                return True
            return False
        name = match["key"].strip()
        self._value_types = self._types.of(self._function, name)
        if "type" in match.groupdict() and match["type"]:
            self._value_types = self._told(match["type"])
        found.append(self._members.key(json.dumps(name, ensure_ascii=False)))
        self._streams = self._value_types == STRING
        self._opened, self._searched = False, 0
        self._text, self._next = self._text[match.end() :], self._value
        return True

    def _told(self, text: str) -> frozenset[str] | None:
        """The types of a value whose tag names its type."""
        names = {name for name, told in self._syntax.types if told == text}
        declared = self._value_types
        if declared is not None and declared & names:
            return declared & names
        return frozenset(names) or declared

    def _value(self, found: list[ToolCallPart]) -> bool:
        """A value up to what closes it."""
        pad = self._syntax.pad
        if not self._opened:
            self._close = self._syntax.close
            if self._syntax.cdata:
                if self._text != _CDATA[0] and _CDATA[0].startswith(self._text):
                    return False
                if self._text.startswith(_CDATA[0]):
                    self._text, self._close = self._text[len(_CDATA[0]) :], _CDATA[1] + self._close
            if pad and pad.startswith(self._text) and self._text != pad:
                return False
            self._text = self._text.removeprefix(pad)
            self._opened = True
            if self._streams:
                found.append(ToolCallArguments(0, '"'))
        close = self._close
        index = self._text.find(close, self._searched)
        if index < 0:
            held = pending(self._text, close)
            self._searched = len(self._text) - held
            if self._streams:
                if pad and self._text[: self._searched].endswith(pad):
                    held += len(pad)
                self._pass_on(self._text[: len(self._text) - held], found)
                self._text = self._text[len(self._text) - held :]
                self._searched = 0
            return False
        value = self._text[:index].removesuffix(pad) if pad else self._text[:index]
        if self._streams:
            self._pass_on(value, found)
            found.append(ToolCallArguments(0, '"'))
        else:
            found.append(ToolCallArguments(0, to_json(value, self._value_types)))
        self._text, self._next = self._text[index + len(close) :], self._arguments
        return True

    def _pass_on(self, text: str, found: list[ToolCallPart]) -> None:
        if text:
            found.append(ToolCallArguments(0, json.dumps(text, ensure_ascii=False)[1:-1]))
