"""Reads the values of a GGUF file's header, within bounds. No torch.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tgi_cli.errors import CorruptFileError

_LONGEST_NAME = 1 << 16
_SHOWN = 60
"""Limit of a name's characters in an error message."""

_READ_AT_ONCE = 1 << 18
"""Bytes of an array of texts: half a million are read faster in pieces than one by one."""

_LENGTH = struct.Struct("<Q")

STRING, ARRAY = 8, 9
"""The numbers of the types of texts and arrays."""
_BOOL = 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Formats of ``struct`` and ``array`` by the number of a value's type."""

Value = bool | int | float | str | list[Any]
"""A value of the metadata."""


@dataclass(slots=True)
class Budget:
    """What may still be read of a part of a header, whose memory it bounds.

    Attributes:
        what: name of the part, for errors.
        bytes: bytes in the file. Texts may take four times as much memory, for characters that
            are beyond 16 bits.
        values: elements of arrays. Each takes up to 60 bytes more than in the file.
    """

    what: str
    bytes: int
    values: int = 0


class ValueReader:
    """Reads values one after the other.

    Attributes:
        budget: that of what is read now.

    Raises:
        CorruptFileError: from all methods: there are fewer bytes, or a limit is exceeded.
        UnicodeDecodeError: a text is not UTF-8.
    """

    def __init__(self, path: Path, stream: BinaryIO, budget: Budget) -> None:
        self.path = path
        self.stream = stream
        self.size = path.stat().st_size
        self.position = 0
        self.budget = budget

    def invalid(self, why: str) -> CorruptFileError:
        return invalid_file(self.path, why)

    def advance(self, size: int) -> None:
        """Count the next bytes, which must be there: no memory is taken for what is not."""
        self.require(size)
        self._count(size)

    def _count(self, size: int) -> None:
        self.position += size
        self.budget.bytes -= size

    def require(self, size: int) -> None:
        """Require so many bytes behind the position."""
        if self.position + size > self.size:
            raise self.invalid(f"it is truncated: its header is longer than its {self.size} bytes")
        if size > self.budget.bytes:
            raise self.invalid(f"it has {self.budget.what} with more bytes than any model's")

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self.advance(size)
        data = self.stream.read(size)
        if len(data) < size:
            raise self.invalid("it became shorter while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def name(self, longest: int = _LONGEST_NAME) -> str:
        length = self.number("Q")
        if length > longest:
            raise self.invalid(f"it states a name of {length} bytes")
        name = self.take(length).decode()
        if not name:
            raise self.invalid("it has a key or a tensor without a name")
        return name

    def value(self, kind: int) -> Value:
        if kind == STRING:
            return self.text()
        if kind == _BOOL:
            return bool(self.number("B"))
        if kind == ARRAY:
            return self.array()
        if kind not in _NUMBERS:
            raise self.invalid(f"it has a value of type {kind}, which there is not")
        number: int | float = self.number(_NUMBERS[kind])
        return number

    def array_head(self) -> tuple[int, int]:
        """The type and the number of an array's values."""
        kind, count = self.number("I"), self.number("Q")
        if count > self.budget.values:
            raise self.invalid(f"it has {self.budget.what} with more values than any model's")
        self.budget.values -= count
        if kind == ARRAY:
            raise self.invalid("it has an array of arrays, which no model has")
        if kind not in (*_NUMBERS, _BOOL, STRING):
            raise self.invalid(f"it has values of type {kind}, which there is not")
        return kind, count

    def array(self) -> list[Any]:
        kind, count = self.array_head()
        if kind == _BOOL:
            return [bool(byte) for byte in self.take(count)]
        if kind == STRING:
            return self.texts(count)
        code = _NUMBERS[kind]
        found = array(code, self.take(count * struct.calcsize(f"<{code}")))
        if sys.byteorder == "big":
            found.byteswap()
        return found.tolist()

    def texts(self, count: int, keep: bool = True) -> list[str]:
        """The next texts, or nothing of them unless they are to be kept."""
        found: list[str] = []
        block, at = b"", 0
        for _ in range(count):
            if len(block) - at < _LENGTH.size:
                block, at = self._longer(block, at, _LENGTH.size), 0
            (size,) = _LENGTH.unpack_from(block, at)
            at += _LENGTH.size
            if len(block) - at < size:
                block, at = self._longer(block, at, size), 0
            if keep:
                found.append(block[at : at + size].decode())
            at += size
        self._count(at)
        self.stream.seek(self.position)
        return found

    def _longer(self, block: bytes, at: int, size: int) -> bytes:
        """A block without its first bytes, which are counted, and with ``size`` or more."""
        self._count(at)
        self.require(size)
        rest = block[at:]
        wanted = min(max(size, _READ_AT_ONCE), self.size - self.position)
        data = rest + self.stream.read(wanted - len(rest))
        if len(data) < size:
            raise self.invalid("it became shorter while it was read")
        return data

    def skip(self, kind: int) -> None:
        """Pass over a text or an array."""
        if kind == STRING:
            self.advance(self.number("Q"))
        else:
            kind, count = self.array_head()
            if kind == STRING:
                self.texts(count, keep=False)
                return
            self.advance(count * struct.calcsize(f"<{_NUMBERS.get(kind, 'B')}"))
        self.stream.seek(self.position)


def short(name: str) -> str:
    """A name for an error message."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def invalid_file(path: Path, why: str) -> CorruptFileError:
    """The error of a file that cannot be read."""
    return CorruptFileError(f"{path} cannot be read: {why}", f"delete {path} and fetch it again")
