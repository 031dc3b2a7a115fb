"""Compares the sizes in config.json with the checkpoint's files before anything is built.

The loader compares every tensor with its layer. For that it builds the layers and a table of the
vocabulary, which could exceed the memory of any machine. So counts and sizes that the files'
headers contradict are refused first. This check is not exact; it bounds the cost of the exact one.
No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tgi_cli.errors import ModelError
from tgi_cli.models.config import shown
from tgi_cli.models.weight_files import file_header, gguf_headers, weight_files

_LAYERS = re.compile(r"(^|_)(layers?|depth|blocks)$")
_EXPERTS = re.compile(r"(^|_)experts$")
_SIZES = re.compile(r"(_size|_dim|_rank|heads?|head_kv|_embd|_inner|_model|_ff)$|^(d|n)_[a-z]+$")
_SKIPPED = ("quantization_config", "compression_config", "id2label", "label2id")
"""Keys whose values are not sizes of tensors."""

MOST_LAYERS = 1024
MOST_EXPERTS = 1024
"""Limit of experts in one layer."""
MOST_PARTS = 1 << 15
"""Limit of layers times experts. Kimi K2 has 61 x 384."""
MOST_SIZE = 1 << 24
"""Limit of a dimension. The largest vocabularies have a quarter of a million tokens."""

_PACKED = 16
"""Elements in one number of a packed weight: 2 bits each in int32."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A summary of a checkpoint's headers.

    Attributes:
        tensors: their number.
        largest: the largest dimension.
        stacked: first dimensions of tensors with three and more, added up: stacked experts.
    """

    tensors: int
    largest: int
    stacked: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]]) -> Outline:
        """Summarize the shapes of tensors."""
        return cls(
            len(shapes),
            max((size for shape in shapes for size in shape), default=0),
            sum(shape[0] for shape in shapes if len(shape) > 2),
        )


def read_outline(path: Path) -> Outline | None:
    """The outline of the checkpoint in a folder, or None without weights.

    Raises:
        CheckpointError: a file cannot be read.
    """
    found = [(file.name, file.stat()) for file in path.glob("*.safetensors*") if file.is_file()]
    # Called whenever the configuration is read; a large model's headers have megabytes.
    if not found:
        gguf = gguf_headers(path)
        return None if gguf is None else Outline.of([each.shape for each in gguf.tensors.values()])
    return _outline(path, frozenset((name, one.st_size, one.st_mtime_ns) for name, one in found))


@lru_cache(maxsize=4)
def _outline(path: Path, state: frozenset[tuple[str, int, int]]) -> Outline | None:
    """As :func:`read_outline`, cached; ``state`` changes with the files."""
    shapes = [
        entry.shape
        for file in sorted(weight_files(path))
        if file.is_file()  # the loader reports absent files
        for entry in file_header(file).values()
    ]
    return Outline.of(shapes) if shapes else None


def check_sizes(path: Path, raw: Mapping[str, Any], quantized: bool, builtin: bool = False) -> None:
    """Refuse counts and sizes of config.json that the checkpoint in ``path`` cannot have.

    Without weights (``--load-format dummy``) only implausible values are refused.

    Args:
        path: the folder.
        raw: its config.json.
        quantized: whether weights may be packed.
        builtin: whether a built-in family runs it, with a module for each expert.

    Raises:
        ModelError: the message names the key.
        CheckpointError: a file's header cannot be read.
    """
    outline = read_outline(path)
    tensors = outline.tensors if outline is not None else 0
    largest = (outline.largest if outline is not None else 0) * (_PACKED if quantized else 1)
    layers = experts = 1
    for key, value in _numbers(raw):
        if _LAYERS.search(key):
            _require(path, key, value, max(MOST_LAYERS, tensors), outline)
            layers = max(layers, value)
        elif builtin and _EXPERTS.search(key):
            _require(path, key, value, max(MOST_EXPERTS, tensors, largest), outline)
            experts = max(experts, value)
        elif key == "vocab_size" and outline is not None:
            _require(path, key, value, largest, outline)
        elif _SIZES.search(key):
            _require(path, key, value, max(MOST_SIZE, largest), outline)
    parts = max(MOST_PARTS, 8 * (tensors + (outline.stacked if outline is not None else 0)))
    if layers * experts > parts:
        raise ModelError(
            f"{path / 'config.json'} states {shown(layers)} layers of {shown(experts)} experts"
            + _beside(outline),
            "download the model again, or correct its config.json",
        )


def _require(path: Path, key: str, value: int, most: int, outline: Outline | None) -> None:
    if value > most:
        raise ModelError(
            f"{path / 'config.json'} states {key!r} {shown(value)}{_beside(outline)}",
            "download the model again, or correct its config.json",
        )


def _beside(outline: Outline | None) -> str:
    if outline is None:
        return ", which is more than any model has"
    return (
        f", and its weights are {outline.tensors} tensors with {outline.largest} as the largest "
        "dimension"
    )


def _numbers(raw: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Keys with whole numbers, those within objects (``text_config``) too."""
    for key, value in raw.items():
        if isinstance(value, dict) and key not in _SKIPPED:
            inner = _numbers(value)
            # Towers cut out of vision-language models state the vocabulary of their text part.
            vision = key == "vision_config"
            yield from (each for each in inner if not (vision and each[0] == "vocab_size"))
        elif type(value) is int:
            yield key, value
