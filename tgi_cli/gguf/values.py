"""Reads the values of a GGUF file's header, within bounds. No torch.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
import sys
from array import array
from pathlib import Path
from typing import Any, BinaryIO

from tgi_cli.errors import CorruptFileError

MOST_VALUES = 1 << 22
"""Limit of all elements of a file's arrays. The largest vocabularies have a quarter of a million
tokens, each with a type and a score, and half a million merges."""

HEADER_BYTES = 256 << 20
"""Limit of a header, of which those of the largest vocabularies have 20 MB."""

_LONGEST_NAME = 1 << 16
_DEEPEST_ARRAY = 4
_SHOWN = 60
"""Limit of a name's characters in an error message."""

_READ_AT_ONCE = 1 << 18
"""Bytes of an array of texts: half a million are read faster in pieces than one by one."""

_LENGTH = struct.Struct("<Q")

ARRAY = 9
"""The number of the type of arrays."""
_BOOL, _STRING = 7, 8
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Formats of ``struct`` and ``array`` by the number of a value's type."""

Value = bool | int | float | str | list[Any]
"""A value of the metadata."""


class ValueReader:
    """Reads values one after the other.

    Raises:
        CorruptFileError: from all methods: there are fewer bytes, or a limit is exceeded.
        UnicodeDecodeError: a text is not UTF-8.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.stream = stream
        self.size = path.stat().st_size
        self.position = 0
        self.values = 0

    def invalid(self, why: str) -> CorruptFileError:
        return invalid_file(self.path, why)

    def advance(self, size: int) -> None:
        """Count the next bytes, which must be there: no memory is taken for what is not."""
        self.require(size)
        self.position += size

    def require(self, size: int) -> None:
        """Require so many bytes behind the position."""
        end = self.position + size
        if end > self.size:
            raise self.invalid(f"it is truncated: its header is longer than its {self.size} bytes")
        if end > HEADER_BYTES:
            raise self.invalid(f"its header has more than {HEADER_BYTES >> 20} MiB")

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self.advance(size)
        data = self.stream.read(size)
        if len(data) < size:
            raise self.invalid("it became shorter while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self, longest: int = HEADER_BYTES) -> str:
        length = self.number("Q")
        if length > longest:
            raise self.invalid(f"it states a text of {length} bytes")
        return self.take(length).decode()

    def name(self) -> str:
        name = self.text(_LONGEST_NAME)
        if not name:
            raise self.invalid("it has a key or a tensor without a name")
        return name

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _BOOL:
            return bool(self.number("B"))
        if kind == ARRAY:
            return self.array(depth + 1)
        if kind not in _NUMBERS:
            raise self.invalid(f"it has a value of type {kind}, which there is not")
        number: int | float = self.number(_NUMBERS[kind])
        return number

    def array_head(self, depth: int) -> tuple[int, int]:
        """The type and the number of an array's values."""
        kind, count = self.number("I"), self.number("Q")
        self.values += count
        if self.values > MOST_VALUES:
            raise self.invalid(f"its arrays have more than {MOST_VALUES} values")
        if depth > _DEEPEST_ARRAY:
            raise self.invalid(f"it nests more than {_DEEPEST_ARRAY} arrays")
        return kind, count

    def array(self, depth: int) -> list[Any]:
        kind, count = self.array_head(depth)
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            found = array(code, self.take(count * struct.calcsize(f"<{code}")))
            if sys.byteorder == "big":
                found.byteswap()
            return found.tolist()
        if kind == _BOOL:
            return [bool(byte) for byte in self.take(count)]
        if kind == _STRING:
            return self.texts(count)
        return [self.value(kind, depth) for _ in range(count)]

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
        self.position += at
        self.stream.seek(self.position)
        return found

    def _longer(self, block: bytes, at: int, size: int) -> bytes:
        """A block without its first bytes, which are counted, and with ``size`` or more."""
        self.position += at
        self.require(size)
        rest = block[at:]
        wanted = min(max(size, _READ_AT_ONCE), self.size - self.position)
        data = rest + self.stream.read(wanted - len(rest))
        if len(data) < size:
            raise self.invalid("it became shorter while it was read")
        return data

    def skip_array(self, depth: int = 1) -> None:
        kind, count = self.array_head(depth)
        if kind in _NUMBERS or kind == _BOOL:
            self.advance(count * struct.calcsize(f"<{_NUMBERS.get(kind, 'B')}"))
            self.stream.seek(self.position)
            return
        if kind == _STRING:
            self.texts(count, keep=False)
            return
        for _ in range(count):
            if kind == ARRAY:
                self.skip_array(depth + 1)
            else:
                self.value(kind, depth)  # which there is not


def short(name: str) -> str:
    """A name for an error message."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def invalid_file(path: Path, why: str) -> CorruptFileError:
    """The error of a file that cannot be read."""
    return CorruptFileError(f"{path} cannot be read: {why}", f"delete {path} and fetch it again")
