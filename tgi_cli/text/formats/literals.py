"""Parses calls whose arguments are literals, such as ``f(a=1, b="x")`` or ``call:f{a:1}``.

The arguments are transcribed to JSON while they are generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from tgi_cli.text.formats.calls import (
    Members,
    TextCallStream,
    ToolCallArguments,
    ToolCallPart,
    ToolCallStart,
    pending,
)
from tgi_cli.text.formats.syntax import LiteralSyntax
from tgi_cli.text.formats.values import ParameterTypes, to_json

_LONGEST_NAME = 256
_LONGEST_HEAD = 800
"""Most characters in front of a call that are searched at a time."""
_LONGEST_KEY = 1024
_LONGEST_ESCAPE = 10
_CLOSES = {"{": "}", "[": "]", "(": ")"}
_WRITTEN = {"(": "[", ")": "]"}
_BLANK = re.compile(r"\s{0,64}")
_WORD = re.compile(r"[^\s,:=(){}\[\]'\"]{1,256}")
_MEMBER = re.compile(r"[^:,{}\[\]]{1,256}")
_COLON = re.compile(r"\s{0,64}:?")
_LONGEST_BARE = 4096
_BARE = re.compile(rf"[^,(){{}}\[\]\n]{{1,{_LONGEST_BARE}}}")
_ESCAPES = {"'": "'", '"': '\\"', "\\": "\\\\", "/": "/", "\n": "", "a": "\\u0007", "v": "\\u000b"}
_SAME = frozenset("nrtbf")
_LENGTHS = {"x": 2, "u": 4, "U": 8}
_MOST_LEVELS = 128


class LiteralStream(TextCallStream):
    """The calls of one region; see :class:`~tgi_cli.text.formats.calls.CallStream`."""

    def __init__(
        self, syntax: LiteralSyntax, types: ParameterTypes, names: Collection[str] | None = None
    ) -> None:
        super().__init__(types, names)
        self._syntax = syntax
        self._call = re.compile(
            rf"{re.escape(syntax.begin)}(?P<name>[\w.-]{{1,{_LONGEST_NAME}}})"
            rf"\s{{0,64}}{re.escape(syntax.open)}"
        )
        self._next = self._outside
        self._position = 0
        self._nested: list[str] = []
        """The brackets that close the open lists and objects."""
        self._awaits_key = self._comma = False
        self._types_of_value: frozenset[str] | None = None
        self._quote = ""
        self._buffer: list[str] | None = None
        """A string that is converted when it is complete."""

    def _outside(self, found: list[ToolCallPart]) -> bool:
        """Text in front of a call."""
        match = self._call.search(self._text)
        if match is None:
            if len(self._text) > _LONGEST_HEAD:
                self._text = self._text[-_LONGEST_HEAD // 2 :]
                self.failed = self._names is not None and not self.began
            return False
        name = match["name"]
        self._text = self._text[match.end() :]
        if self._names is not None and name not in self._names:
            self.failed = not self.began
            return True
        self._function, self._position, self._members = name, 0, Members()
        self.began = True
        found.append(ToolCallStart(0, "", name))
        self._next = self._argument
        return True

    def _argument(self, found: list[ToolCallPart]) -> bool:
        """Between two arguments."""
        text = self._text = self._text.lstrip(", \t\r\n")
        if not text:
            return False
        if text.startswith(self._syntax.close):
            found.append(self._members.close())
            self._text, self._next = text[len(self._syntax.close) :], self._outside
            return True
        if self._quote_at(text) is None and self._may_open(text):
            return False
        key = self._key(text)
        if key is None:
            return False
        name, length = key
        if name is None:
            declared = self._types.names(self._function)
            index = self._position
            name = declared[index] if index < len(declared) else f"argument_{index + 1}"
        self._position += 1
        self._text = text[length:]
        self._types_of_value = self._types.of(self._function, name)
        found.append(self._members.key(json.dumps(name, ensure_ascii=False)))
        self._nested, self._awaits_key = [], False
        self._next = self._value
        return True

    def _key(self, text: str) -> tuple[str | None, int] | None:
        """A key and the length of what is before its value; None if more text is needed.

        The key is None if the value has none.
        """
        equals = self._syntax.equals
        quote = self._quote_at(text)
        if quote and equals == "=":
            return None, 0
        if quote:
            quoted = self._quoted(text, quote)
            if quoted is None:
                return None if len(text) < _LONGEST_KEY else (None, 0)
            name, index = quoted
        else:
            match = _WORD.match(text)
            if match is None:
                return None, 0
            name, index = match.group(), match.end()
        blank = _BLANK.match(text, index)
        index = blank.end() if blank else index
        if index >= len(text):
            return None
        if text.startswith(equals, index):
            return name, index + len(equals)
        return None, 0

    def _value(self, found: list[ToolCallPart]) -> bool:
        """Within the value of an argument, outside strings."""
        text = self._text = self._text.lstrip()
        if not text:
            return False
        first = text[0]
        if self._nested and first == self._nested[-1]:
            self._nested.pop()
            self._write(_WRITTEN.get(first, first), found)
            return self._after(text[1:])
        if not self._nested and text.startswith(self._syntax.close):
            self._write("null", found)  # a key without a value
            self._next = self._argument
            return True
        if first == ",":
            if self._nested:
                self._text = text[1:]
                return True
            self._write("null", found)
            self._next = self._argument
            return True
        if first in _CLOSES and len(self._nested) < _MOST_LEVELS:
            self._nested.append(_CLOSES[first])
            self._write(_WRITTEN.get(first, first), found)
            self._text, self._awaits_key = text[1:], first == "{"
            self._next = self._item
            return True
        quote = self._quote_at(text)
        if quote is None and self._may_open(text):
            return False
        if quote:
            self._text, self._quote = text[len(quote) :], quote
            declared = None if self._nested else self._types_of_value
            self._buffer = [] if declared is not None and "string" not in declared else None
            if self._buffer is None:
                self._write('"', found)
            self._next = self._string
            return True
        match = _BARE.match(text)
        if match is None:
            self._text = text[1:]  # a bracket that closes nothing
            return True
        if match.end() == len(text) and match.end() < _LONGEST_BARE:
            return False
        word = match.group().strip()
        plain = self._nested or (not self._syntax.quotes and word in ("None", "null"))
        self._write(to_json(word, None if plain else self._types_of_value), found)
        return self._after(text[match.end() :])

    def _after(self, rest: str) -> bool:
        """Go on after a value."""
        self._text = rest
        self._next = self._item if self._nested else self._argument
        self._awaits_key = bool(self._nested) and self._nested[-1] == "}"
        return True

    def _item(self, found: list[ToolCallPart]) -> bool:
        """Between two items of a list or members of an object."""
        text = self._text = self._text.lstrip()
        if not text:
            return False
        if text[0] == self._nested[-1]:
            self._comma, self._next = False, self._value
            return True
        if text[0] == ",":
            self._text, self._comma = text[1:], True
            return True
        if self._comma:
            self._comma = False
            self._write(", ", found)
        if self._awaits_key:
            key = self._member(text)
            if key is None:
                return False
            name, length = key
            self._write(f"{json.dumps(name, ensure_ascii=False)}: ", found)
            self._text = text[length:]
        self._next = self._value
        return True

    def _member(self, text: str) -> tuple[str, int] | None:
        """The key of an object's member, and the length of what is before its value."""
        quote = self._quote_at(text)
        if quote is None and self._may_open(text):
            return None
        if quote:
            quoted = self._quoted(text, quote)
            if quoted is None:
                return None if len(text) < _LONGEST_KEY else ("", len(quote))
            name, index = quoted
        else:
            match = _MEMBER.match(text)
            if match is None:
                return "", 1
            name, index = match.group().strip(), match.end()
        colon = _COLON.match(text, index)
        assert colon is not None
        if colon.end() == len(text) and not colon.group().endswith(":"):
            return None
        return name, colon.end()

    def _quoted(self, text: str, quote: str) -> tuple[str, int] | None:
        """The string that a text begins with, and its length; None if it does not end soon."""
        if self._syntax.quotes:
            end = text.find(quote, len(quote), _LONGEST_KEY)
            return None if end < 0 else (text[len(quote) : end], end + len(quote))
        parts: list[str] = []
        index = 1
        while index < min(len(text), _LONGEST_KEY):
            if text[index] == quote:
                name: str = json.loads(f'"{"".join(parts)}"')
                return name.encode(errors="replace").decode(), index + 1
            if text[index] != "\\":
                parts.append(json.dumps(text[index])[1:-1])
                index += 1
                continue
            taken = _escape(text[index : index + _LONGEST_ESCAPE])
            if taken is None:
                return None
            parts.append(taken[0])
            index += taken[1]
        return None

    def _quote_at(self, text: str) -> str | None:
        """What quotes the string that a text begins with."""
        for quote in (self._syntax.quotes,) if self._syntax.quotes else ("'", '"'):
            if text.startswith(quote):
                return quote
        return None

    def _may_open(self, text: str) -> bool:
        """Whether more text may make this the beginning of a string."""
        return len(text) < len(self._syntax.quotes) and self._syntax.quotes.startswith(text)

    def _string(self, found: list[ToolCallPart]) -> bool:
        """Within a string."""
        quote = self._quote
        end = self._text.find(quote)
        escape = -1 if self._syntax.quotes else self._text.find("\\")
        if escape >= 0 and (end < 0 or escape < end):
            self._passed(self._text[:escape], found)
            self._text = self._text[escape:]
            taken = _escape(self._text)
            if taken is None:
                return False
            written, length = taken
            if self._buffer is not None:
                self._buffer.append(json.loads(f'"{written}"'))
            else:
                self._write(written, found)
            self._text = self._text[length:]
            return True
        if end < 0:
            held = pending(self._text, quote)
            self._passed(self._text[: len(self._text) - held], found)
            self._text = self._text[len(self._text) - held :]
            return False
        self._passed(self._text[:end], found)
        if self._buffer is not None:
            text = (
                "".join(self._buffer).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            )
            self._write(to_json(text, self._types_of_value), found)
        else:
            self._write('"', found)
        self._buffer = None
        return self._after(self._text[end + len(quote) :])

    def _passed(self, text: str, found: list[ToolCallPart]) -> None:
        """More of a string."""
        if self._buffer is not None:
            self._buffer.append(text)
        elif text:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1], found)

    def _write(self, text: str, found: list[ToolCallPart]) -> None:
        found.append(ToolCallArguments(0, text))


def _escape(text: str) -> tuple[str, int] | None:
    """The JSON of the escape that a text begins with, and its length; None if it goes on."""
    if len(text) < 2:
        return None
    letter = text[1]
    if letter in _SAME:
        return text[:2], 2
    if letter in _ESCAPES:
        return _ESCAPES[letter], 2
    if letter in _LENGTHS:
        length = 2 + _LENGTHS[letter]
        digits = text[2:length]
        if re.fullmatch(r"[0-9a-fA-F]*", digits) is None:
            return "\\\\", 1
        if len(text) < length:
            return None
        code = int(digits, 16)
        if letter == "u":
            return text[:length], length
        character = chr(code) if code < 0x110000 else "\ufffd"
        return json.dumps(character, ensure_ascii=True)[1:-1], length
    return "\\\\", 1
