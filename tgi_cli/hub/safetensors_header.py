"""Headers of safetensors files: names, dtypes, shapes and offsets of tensors. No torch.

https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_cli import files
from tgi_cli.errors import CorruptFileError

HEADER_BYTES = 100_000_000
"""Longest header in bytes, which safetensors enforces, too."""

_HEADER_VALUES = 4_000_000
"""JSON values in a header: eight per tensor allow half a million tensors."""

_MAX_FILE = 1 << 63


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        dtype: safetensors' name, such as ``BF16``.
        shape: its dimensions.
        start: offset of its bytes in the file.
        size: its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the tensors' entries by name, and check the file's size. No weights are read.

    Raises:
        OSError: the file cannot be read.
        CorruptFileError: the file is not safetensors, truncated, or has an invalid header.
    """
    try:
        files.require_file(path, _MAX_FILE)
    except files.FileRefusedError as error:
        raise CorruptFileError(f"{path} cannot be read: {error}", "fetch it again") from error
    size = path.stat().st_size
    remedy = f"delete {path} and fetch it again"
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= HEADER_BYTES:
            raise CorruptFileError(f"{path} is not a safetensors file", remedy)
        if length > size - 8:
            raise CorruptFileError(
                f"{path} is truncated: {size} bytes, and its header alone has {length}", remedy
            )
        text = stream.read(length)
    try:
        parsed = files.decode_json(text, _HEADER_VALUES)
        entries = {
            name: _entry(about, 8 + length)
            for name, about in parsed.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f": {error}" if isinstance(error, files.FileRefusedError) else ""
        raise CorruptFileError(f"the header of {path} cannot be read{why}", remedy) from error
    wanted = max((entry.start + entry.size for entry in entries.values()), default=8 + length)
    if size < wanted:
        raise CorruptFileError(f"{path} is truncated: {size} of {wanted} bytes", remedy)
    if size > wanted:
        raise CorruptFileError(f"{path} has {size - wanted} bytes more than its header", remedy)
    return entries


def _entry(about: Mapping[str, Any], data: int) -> TensorEntry:
    """Parse an entry; ValueError, KeyError, TypeError or AttributeError if it is invalid."""
    shape, (start, end) = about["shape"], about["data_offsets"]
    numbers = [*shape, start, end]
    if not all(type(number) is int and number >= 0 for number in numbers) or start > end:
        raise ValueError("sizes and offsets are not integers, or contradict each other")
    if len(shape) > files.MAX_DEPTH:
        raise ValueError("a tensor has too many dimensions")
    return TensorEntry(str(about["dtype"]), tuple(shape), data + start, end - start)
