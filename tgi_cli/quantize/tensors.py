"""Tensors from safetensors files to others, byte for byte, without holding them.

https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_cli.hub.headers import read_header

_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class Bytes:
    """Where a tensor's bytes are."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def alignment(self) -> int:
        """Bytes of an element."""
        count = 1
        for size in self.shape:
            count *= size
        return self.size // count if count else 1


def tensors_in(file: Path) -> list[Bytes]:
    """The tensors of a safetensors file, which must be whole."""
    return [
        Bytes(name, file, entry.dtype, entry.shape, entry.start, entry.size)
        for name, entry in read_header(file).items()
    ]


def write_file(path: Path, tensors: Iterable[Bytes]) -> None:
    """Copy tensors into one file, those with the largest elements first: all stay aligned."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.alignment)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            with tensor.file.open("rb") as source:
                source.seek(tensor.start)
                left = tensor.size
                while left:
                    piece = source.read(min(_CHUNK, left))
                    if not piece:
                        raise OSError(f"{tensor.file} ended while it was copied")
                    target.write(piece)
                    left -= len(piece)


def write_shards(folder: Path, tensors: Mapping[str, Bytes], max_bytes: int) -> int:
    """Write ``model.safetensors``, or files of at most ``max_bytes`` with an index.

    A tensor that is larger has a file of its own. Returns the bytes of all tensors.
    """
    shards: list[list[Bytes]] = [[]]
    size = 0
    for tensor in tensors.values():
        if shards[-1] and size + tensor.size > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    total = sum(tensor.size for tensor in tensors.values())
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0])
        return total
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, shard)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return total
