"""Writes GGUF files, version 3.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import io
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tgi_cli.gguf.reader import MAGIC
from tgi_cli.gguf.tensor_types import TENSOR_TYPES
from tgi_cli.gguf.values import Value

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10
"""Ids of the types of values."""

_TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write.

    Attributes:
        name: such as ``blk.0.attn_q.weight``.
        shape: its dimensions, outermost first.
        type: the name of its blocks' type, such as ``Q8_0``.
        read: yields its bytes in order; called once, when it is written.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    read: Callable[[], Iterable[bytes | memoryview]]

    @property
    def size(self) -> int:
        """Its bytes."""
        kind = TENSOR_TYPES[_TYPE_NUMBERS[self.type]]
        return prod(self.shape) // kind.elements * kind.size


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Sequence[TensorSource]) -> None:
    """Write a file, one tensor after the other.

    Args:
        path: path of the file, which is replaced.
        metadata: whole numbers become uint32 (int32 if negative, and in arrays), others float32.

    Raises:
        OSError: the file cannot be written.
        ValueError: a value has no type of GGUF's, or a tensor's bytes are not of its size.
    """
    header = io.BytesIO()
    header.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header.write(_text(key) + _value(value))
    offset = 0
    for tensor in tensors:
        header.write(_text(tensor.name))
        header.write(struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1]))
        header.write(struct.pack("<IQ", _TYPE_NUMBERS[tensor.type], offset))
        offset += _aligned(tensor.size)
    with path.open("wb") as stream:
        stream.write(header.getvalue())
        stream.write(bytes(_aligned(stream.tell()) - stream.tell()))
        for tensor in tensors:
            size = sum(stream.write(part) for part in tensor.read())
            if size != tensor.size:
                raise ValueError(f"{tensor.name} has {size} instead of {tensor.size} bytes")
            stream.write(bytes(_aligned(size) - size))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    """A value with the number of its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        if value < 0:
            return struct.pack("<Ii", _INT32, value)
        wide = value >= 1 << 32
        return struct.pack("<IQ" if wide else "<II", _UINT64 if wide else _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if value and all(isinstance(each, str) for each in value):
        content = b"".join(map(_text, value))
        kind = _STRING
    elif all(type(each) is int for each in value):
        kind, content = _INT32, array("i", value).tobytes()
    elif all(type(each) is float for each in value):
        kind, content = _FLOAT32, array("f", value).tobytes()
    elif all(type(each) is bool for each in value):
        kind, content = _BOOL, bytes(value)
    else:
        raise ValueError(f"the array {value!r:.60} has elements of several types")
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + content
