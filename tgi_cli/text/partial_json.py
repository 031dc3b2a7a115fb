"""Values within a JSON text, found while the text arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[str, ...]
"""Keys that lead from an element to a value."""

_PLAIN = re.compile(r'[^"\\]*')
_BLANK = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r'[^ \t\r\n{}\[\],:"]*')


@dataclass(frozen=True, slots=True)
class JsonChunk:
    """More of a value's JSON, verbatim.

    Attributes:
        element: which of the top-level values it belongs to, or which item of the list.
        path: where in it; None: the element as a whole, which ends here.
        complete: nothing more of the value comes.
    """

    element: int
    path: Path | None
    text: str
    complete: bool


class JsonValueStream:
    """The values at some paths of every element of a text, piece by piece as they are written.

    Elements are the top-level values, or with ``items`` the items of a top-level list. Values
    come out the same however the text was cut, but for where they are cut themselves. What is
    no JSON gives whatever the brackets and quotes suggest, never an error.
    """

    def __init__(self, paths: Iterable[Path], items: bool = False) -> None:
        self._paths = frozenset(paths)
        self._base = 1 if items else 0
        self._items = items
        self._element = -1
        self._frames: list[str | None] = []
        """One for each open bracket: the key within an object, None in a list."""
        self._objects: list[bool] = []
        self._awaits = True
        """A value may begin here."""
        self._string = False
        self._escaped = False
        self._scalar = False
        self._spelled: list[str] = []
        """The last string outside values that are wanted: perhaps a key."""
        self._wanted: Path | None = None
        self._depth = 0
        """Of the wanted value."""

    def push(self, text: str) -> list[JsonChunk]:
        """What the next piece of the text adds."""
        parts: list[JsonChunk] = []
        begin = place = 0
        while place < len(text):
            if self._string:
                start = place
                place = self._within_string(text, place)
                if self._wanted is None:
                    self._spelled.append(text[start:place])
                if not self._string and not self._awaits:
                    self._end(parts, text, begin, place)
                continue
            if self._scalar:
                match = _SCALAR.match(text, place)
                place = match.end() if match else place
                if place == len(text):
                    break
                self._scalar = False
                self._end(parts, text, begin, place)
                continue
            match = _BLANK.match(text, place)
            if match and match.end() > place:
                place = match.end()
                continue
            char = text[place]
            if not self._frames and char not in '{["':
                place += 1  # between two elements
                continue
            if self._awaits and char not in "]},:":
                in_object = bool(self._objects) and self._objects[-1]
                if not in_object or self._frames[-1] is not None:
                    begin = self._begin(place, begin)
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
                self._end(parts, text, begin, place + 1)
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
            place += 1
        if self._wanted is not None and begin < len(text):
            parts.append(JsonChunk(self._element, self._wanted, text[begin:], False))
        return parts

    def _within_string(self, text: str, place: int) -> int:
        """Go on to the closing quote, or to the end of the piece."""
        if self._escaped:
            self._escaped = False
            return place + 1
        match = _PLAIN.match(text, place)
        place = match.end() if match else place
        if place < len(text):
            self._escaped = text[place] == "\\"
            self._string = self._escaped
            place += 1
        return place

    def _begin(self, place: int, begin: int) -> int:
        """A value starts; where the wanted one does."""
        depth = len(self._frames)
        if depth == self._base:
            self._element += 1
        if self._wanted is None and depth >= self._base:
            keys = self._frames[self._base :]
            path = tuple(key for key in keys if key is not None)
            if len(path) == len(keys) and path in self._paths:
                self._wanted, self._depth = path, depth
                return place
        return begin

    def _end(self, parts: list[JsonChunk], text: str, begin: int, place: int) -> None:
        """A value ended just before ``place``."""
        depth = len(self._frames)
        if self._wanted is not None and depth <= self._depth:
            parts.append(JsonChunk(self._element, self._wanted, text[begin:place], True))
            self._wanted = None
        if depth == self._base and self._element >= 0:
            parts.append(JsonChunk(self._element, None, "", True))
            self._awaits = not self._items
