"""Reads the headers of GGUF files, versions 2 and 3, within bounds. No torch.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from tgi_cli import files
from tgi_cli.errors import CorruptFileError, UnsupportedModelError
from tgi_cli.gguf.tensor_types import INTEGERS, REMOVED, TENSOR_TYPES, TensorType
from tgi_cli.gguf.values import ARRAY, STRING, Budget, Value, ValueReader, invalid_file, short

MAGIC = b"GGUF"
SHARD = re.compile(
    r"(?P<prefix>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE
)
"""The file name of a part of a checkpoint."""

MOST_TENSORS = 1 << 16
MOST_KEYS = 1 << 16
MOST_SHARDS = 1 << 10

_LONGEST_TENSOR_NAME = 1 << 7
"""Bytes; llama.cpp reads names of up to 63."""

_MOST_DIMENSIONS = 4
_LARGEST_ALIGNMENT = 1 << 16
_MAX_FILE = 1 << 63

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a file.

    Attributes:
        name: such as ``blk.0.attn_q.weight``.
        shape: its dimensions, outermost first; a matrix is [out, in].
        type: of its blocks, which lie within rows.
        file: path of its file.
        start: offset of its bytes in the file.
        size: number of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file: Path
    start: int
    size: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The headers of a checkpoint, which may be split into several files.

    Attributes:
        path: the file, or the first of several.
        metadata: its keys and values. Arrays are lists; those of strings have strings.
        tensors: of all files, by name, in their order.
        shards: all files, in their order.
        size: bytes of all files.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]
    shards: tuple[Path, ...]
    size: int

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``, such as ``llama``; empty without one."""
        return self.get("general.architecture", str, "")

    @property
    def has_integers(self) -> bool:
        """Whether some weights are integers with scales."""
        return any(each.type.name in INTEGERS for each in self.tensors.values())

    def get(self, key: str, kind: type[T], default: T) -> T:
        """A value, or ``default`` if the key is missing.

        A whole number is accepted for a float.

        Raises:
            CorruptFileError: it is of another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CorruptFileError(
                f"{self.path} cannot be read: its key {short(key)} is no {kind.__name__}",
                _remedy(self),
            )
        return value

    def values(self, key: str, kind: type[T]) -> list[T]:
        """The elements of an array, all of one type; empty if the key is missing.

        Whole numbers are accepted for floats.

        Raises:
            CorruptFileError: it is no array, or has elements of another type.
        """
        found = self.get(key, list, [])
        if kind is float:
            found = [float(each) if type(each) is int else each for each in found]
        if not all(type(each) is kind for each in found):
            raise CorruptFileError(
                f"{self.path} cannot be read: its key {short(key)} is no array of {kind.__name__}",
                _remedy(self),
            )
        return found


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does. Raises OSError."""
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the checkpoint that ``path`` is a part of, by its name; else itself alone."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MOST_SHARDS:
        raise CorruptFileError(
            f"{path} cannot be read: its name is that of a part which cannot be", "rename it"
        )
    suffix = path.name[len(path.stem) :]
    return tuple(
        path.with_name(f"{match['prefix']}-{number:05}-of-{match['count']}{suffix}")
        for number in range(1, count + 1)
    )


def read_gguf(path: Path, *, vocabulary: bool = True) -> GGUFFile:
    """Read the headers of a file, or of all parts if it is one part. No weights are read.

    Args:
        path: the file, or any of its parts.
        vocabulary: whether to keep the tokenizer's arrays and its tokenizer.json. Tokens and merges
            of a large vocabulary are 800,000 strings, which take 50 MB.

    Raises:
        OSError: a file cannot be read.
        CorruptFileError: a part is missing; a file is not GGUF, is truncated or has an invalid
            header.
        UnsupportedModelError: a version, or a type of tensors, that is not known.
    """
    paths = shard_paths(path)
    absent = [each.name for each in paths if not each.exists()]
    if absent and len(paths) > 1:
        shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if absent[5:] else "")
        raise CorruptFileError(
            f"{path.name} is one of {len(paths)} files, and some are not beside it: {shown}",
            "download all parts into one folder",
        )
    first = _read_header(paths[0], vocabulary)
    _require_number(first, 0)
    tensors = dict(first.tensors)
    size = first.size
    for number, each in enumerate(paths[1:], 1):
        shard = _read_header(each, vocabulary=False)
        _require_number(shard, number)
        twice = next((name for name in shard.tensors if name in tensors), None)
        if twice is not None:
            raise invalid_file(each, f"its tensor {short(twice)} is in an earlier part, too")
        tensors |= shard.tensors
        if len(tensors) > MOST_TENSORS:
            raise invalid_file(each, f"its parts have more than {MOST_TENSORS} tensors")
        size += shard.size
    expected = first.get("split.tensors.count", int, len(tensors))
    count = first.get("split.count", int, len(paths))
    if count not in (0, len(paths)):
        raise CorruptFileError(
            f"{paths[0]} is one of {count} files by its header, and of {len(paths)} by its name",
            "give the files the names that they were published with",
        )
    if len(tensors) != expected:
        raise invalid_file(paths[0], f"its parts have {len(tensors)} of {expected} tensors")
    return GGUFFile(paths[0], first.metadata, tensors, paths, size)


def _require_number(shard: GGUFFile, number: int) -> None:
    """Require a file to be the part that its name says, from 0 on."""
    stated = shard.get("split.no", int, number)
    if stated != number:
        name = f"part {number + 1} by its name"
        raise CorruptFileError(
            f"{shard.path} is part {stated + 1} by its header, and {name}",
            "give the files the names that they were published with",
        )


def _read_header(path: Path, vocabulary: bool) -> GGUFFile:
    """Read one file's header."""
    try:
        files.require_file(path, _MAX_FILE)
    except files.FileRefusedError as error:
        raise invalid_file(path, str(error)) from error
    with path.open("rb") as stream:
        header = _Header(path, stream, vocabulary)
        try:
            return header.file()
        except UnicodeDecodeError as error:
            raise header.invalid("its text is not UTF-8") from error


_TOKENIZER_JSON = "tokenizer.huggingface.json"
"""A whole tokenizer.json as a text. Those of the largest vocabularies have 33 MB."""


class _Header(ValueReader):
    """Parses a header from its beginning."""

    def __init__(self, path: Path, stream: BinaryIO, vocabulary: bool) -> None:
        # Most are short; chat templates have up to 100 KB, and arrays a number for each layer.
        self.others = Budget("keys", 16 << 20, 1 << 18)
        # The largest vocabularies have 262,144 tokens, each with a type, and a score or two merges:
        # 1.3 million values in 20 MB.
        self.arrays = Budget("arrays of a tokenizer", 32 << 20, 1 << 21)
        self.json = Budget(f"a {_TOKENIZER_JSON}", 40 << 20)
        super().__init__(path, stream, self.others)
        self.vocabulary = vocabulary

    def file(self) -> GGUFFile:
        if self.size < len(MAGIC) or self.take(len(MAGIC)) != MAGIC:
            raise CorruptFileError(
                f"{self.path} is not a GGUF file", "name a file that llama.cpp could read"
            )
        version = self.number("I")
        if version not in (2, 3):
            big = version >= 1 << 16
            what = "is in big-endian byte order" if big else f"is GGUF of version {version}"
            raise UnsupportedModelError(
                f"{self.path} {what}, and versions 2 and 3 in little-endian byte order are read",
                "download a newer file of the model",
            )
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        if num_tensors > MOST_TENSORS or num_keys > MOST_KEYS:
            raise self.invalid(f"it states {num_tensors} tensors and {num_keys} keys")
        metadata: dict[str, Value] = {}
        names: set[str] = set()
        for _ in range(num_keys):
            key = self.name()
            if key in names:
                raise self.invalid(f"it has the key {short(key)} twice")
            names.add(key)
            kind = self.number("I")
            if key == _TOKENIZER_JSON and kind == STRING:
                self.budget = self.json
            elif key.startswith("tokenizer.") and kind == ARRAY:
                self.budget = self.arrays
            if self.vocabulary or self.budget is self.others:
                metadata[key] = self.value(kind)
            else:
                self.skip(kind)
            self.budget = self.others
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not _is_power(alignment):
            raise self.invalid("its general.alignment is no power of two up to 65536")
        self.budget = Budget("names of tensors", MOST_TENSORS * 200)
        entries = [self.entry(alignment) for _ in range(num_tensors)]
        data = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, stored, offset, size in entries:
            if name in tensors:
                raise self.invalid(f"it has the tensor {short(name)} twice")
            tensors[name] = GGUFTensor(name, shape, stored, self.path, data + offset, size)
        self.check_data(tensors)
        return GGUFFile(self.path, metadata, tensors, (self.path,), self.size)

    def entry(self, alignment: int) -> tuple[str, tuple[int, ...], TensorType, int, int]:
        """A tensor's name, shape, type, offset within the data, and size."""
        name = self.name(_LONGEST_TENSOR_NAME)
        num_dims = self.number("I")
        if num_dims > _MOST_DIMENSIONS:
            raise self.invalid(f"its tensor {short(name)} has {num_dims} dimensions")
        *dims, code, offset = struct.unpack(f"<{num_dims}QIQ", self.take(8 * num_dims + 12))
        shape = tuple(reversed(dims))
        if code not in TENSOR_TYPES:
            known = REMOVED.get(code, f"of number {code}")
            raise UnsupportedModelError(
                f"{self.path} has tensors of type {known}, which is not supported: {short(name)}",
                "download another file of the model, such as Q8_0 or Q4_K_M",
            )
        kind = TENSOR_TYPES[code]
        row = shape[-1] if shape else 1
        if row % kind.elements or not all(shape):
            raise self.invalid(
                f"its tensor {short(name)} of type {kind.name} has the shape {list(shape)}"
            )
        if offset % alignment:
            raise self.invalid(f"its tensor {short(name)} is not aligned")
        return name, shape, kind, offset, math.prod(shape) // kind.elements * kind.size

    def check_data(self, tensors: Mapping[str, GGUFTensor]) -> None:
        """Require all data within the file, and none of it in two tensors."""
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        end = self.position
        for tensor in ordered:
            if tensor.start < end:
                raise self.invalid(f"its tensor {short(tensor.name)} overlaps with another")
            end = tensor.start + tensor.size
        if end > self.size:
            raise CorruptFileError(
                f"{self.path} is truncated: {self.size} of {end} bytes", f"fetch {self.path} again"
            )


def _is_power(number: int) -> bool:
    return 0 < number <= _LARGEST_ALIGNMENT and not number & (number - 1)


def _remedy(file: GGUFFile) -> str:
    return f"delete {file.path} and fetch it again"
