"""Extracts values from JSON text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[str, ...]
"""Keys from an element to a value."""

_PLAIN = re.compile(r'[^"\\]*')
_BLANK = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r'[^ \t\r\n{}\[\],:"]*')


@dataclass(frozen=True, slots=True)
class JsonChunk:
    """More of a value's JSON, verbatim.

    Attributes:
        path: Path of the value, or None at the end of an element.
        complete: The value ends with this chunk.
    """

    path: Path | None
    text: str
    complete: bool


class JsonValueStream:
    """Extracts the values at some paths of every element, as they arrive.

    The joined chunks of a value do not depend on how the text was split. Invalid JSON raises
    nothing: brackets and quotes decide.

    Args:
        paths: Paths of the values.
        items: The elements are the items of a top-level list. Default: the top-level values.
    """

    def __init__(self, paths: Iterable[Path], items: bool = False) -> None:
        self._paths = frozenset(paths)
        self._base = 1 if items else 0
        self._items = items
        self._started = False
        self._frames: list[str | None] = []
        """For each open bracket the current key, or None in a list."""
        self._objects: list[bool] = []
        self._awaits = True
        """Whether a value may begin here."""
        self._string = False
        self._escaped = False
        self._scalar = False
        self._spelled: list[str] = []
        """The last string outside extracted values: perhaps a key."""
        self._wanted: Path | None = None
        self._depth = 0
        """Nesting level of the extracted value."""

    def push(self, text: str) -> list[JsonChunk]:
        """The chunks in more text."""
        chunks: list[JsonChunk] = []
        begin = index = 0
        while index < len(text):
            if self._string:
                start = index
                index = self._within_string(text, index)
                if self._wanted is None:
                    self._spelled.append(text[start:index])
                if not self._string and not self._awaits:
                    self._end(chunks, text, begin, index)
                continue
            if self._scalar:
                match = _SCALAR.match(text, index)
                index = match.end() if match else index
                if index == len(text):
                    break
                self._scalar = False
                self._end(chunks, text, begin, index)
                continue
            match = _BLANK.match(text, index)
            if match and match.end() > index:
                index = match.end()
                continue
            char = text[index]
            if not self._frames and char not in '{["':
                index += 1  # between two elements
                continue
            if self._awaits and char not in "]},:":
                in_object = bool(self._objects) and self._objects[-1]
                if not in_object or self._frames[-1] is not None:
                    begin = self._begin(index, begin)
                    self._awaits = False
            if char == '"':
                self._string, self._spelled = True, []
            elif char in "{[":
                self._frames.append(None)
                self._objects.append(char == "{")
                self._awaits = True
            elif char in "}]":
                if self._frames:
                    self._frames.pop()
                    self._objects.pop()
                self._awaits = False
                self._end(chunks, text, begin, index + 1)
            elif char == ":":
                if self._objects and self._objects[-1]:
                    self._frames[-1] = "".join(self._spelled)[:-1]
                    self._awaits = True
            elif char == ",":
                if self._objects and self._objects[-1]:
                    self._frames[-1] = None
                self._awaits = True
            else:
                self._scalar = True
                continue
            index += 1
        if self._wanted is not None and begin < len(text):
            chunks.append(JsonChunk(self._wanted, text[begin:], False))
        return chunks

    def _within_string(self, text: str, index: int) -> int:
        """Skip to the closing quote, or to the end of the text."""
        if self._escaped:
            self._escaped = False
            return index + 1
        match = _PLAIN.match(text, index)
        index = match.end() if match else index
        if index < len(text):
            self._escaped = text[index] == "\\"
            self._string = self._escaped
            index += 1
        return index

    def _begin(self, index: int, begin: int) -> int:
        """Begin a value. Returns where the extracted value begins."""
        depth = len(self._frames)
        if depth == self._base:
            self._started = True
        if self._wanted is None and depth >= self._base:
            keys = self._frames[self._base :]
            path = tuple(key for key in keys if key is not None)
            if len(path) == len(keys) and path in self._paths:
                self._wanted, self._depth = path, depth
                return index
        return begin

    def _end(self, chunks: list[JsonChunk], text: str, begin: int, index: int) -> None:
        """End a value just before ``index``."""
        depth = len(self._frames)
        if self._wanted is not None and depth <= self._depth:
            chunks.append(JsonChunk(self._wanted, text[begin:index], True))
            self._wanted = None
        if depth == self._base and self._started:
            chunks.append(JsonChunk(None, "", True))
            self._awaits = not self._items
