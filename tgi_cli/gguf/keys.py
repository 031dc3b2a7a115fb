"""The keys of a GGUF file that describe its architecture, and the shapes that go with them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.gguf.reader import GGUFFile
from tgi_cli.gguf.values import short

_LARGEST = 1 << 31
_MOST_LAYERS = 1 << 12
_MOST_HEADS = 1 << 16
_LARGEST_FLOAT32 = 3.4e38
_REMEDY = "download another file of the model"


@dataclass(frozen=True, slots=True)
class ArchitectureKeys:
    """Reads keys below the architecture's name, such as ``llama.block_count``.

    Raises:
        ModelError: from all methods: a key is missing, of another type or out of range.
    """

    file: GGUFFile

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``."""
        return self.file.architecture

    def has(self, name: str) -> bool:
        """Whether the file has the key."""
        return f"{self.architecture}.{name}" in self.file.metadata

    def invalid(self, problem: str) -> ModelError:
        """The error of a file whose keys or shapes make no model."""
        return ModelError(f"{self.file.path}: {problem}", _REMEDY)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least`` on; of an array, the number that all its elements are."""
        value = self._value(name, default)
        if isinstance(value, list):
            if len(set(map(str, value))) != 1:
                raise UnsupportedModelError(
                    f"{self.file.path}: layers that differ in {self.architecture}.{name} are not "
                    "supported",
                    _REMEDY,
                )
            value = value[0]
        if type(value) is not int or not least <= value < _LARGEST:
            raise self.invalid(f"{self.architecture}.{name} is {short(repr(value))}")
        return value

    def wholes(self, name: str, count: int) -> list[int]:
        """Whole numbers of ``count`` layers, none below 0; a single number is that of all."""
        value = self._value(name, None)
        values: list[Any] = value if isinstance(value, list) else [value] * count
        if len(values) < count or not all(
            type(each) is int and 0 <= each < _LARGEST for each in values
        ):
            raise self.invalid(f"{self.architecture}.{name} is not a number for each layer")
        return values[:count]

    def real(self, name: str, default: float | None = None) -> float:
        """A finite number, not below 0."""
        value: Any = self._value(name, default)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.invalid(f"{self.architecture}.{name} is {short(repr(value))}")
        return _shortest(float(value))

    def flag(self, name: str, default: bool) -> bool:
        """A switch."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.invalid(f"{self.architecture}.{name} is {short(repr(value))}")
        return value

    def flags(self, name: str) -> list[bool] | None:
        """A switch of each layer; None if the key is missing or no array."""
        stated = self.file.metadata.get(f"{self.architecture}.{name}")
        if not isinstance(stated, list):
            return None
        layers = stated[: self.num_layers]
        if len(layers) < self.num_layers or not all(type(each) in (bool, int) for each in layers):
            raise self.invalid(f"{self.architecture}.{name} is not a switch for each layer")
        return [bool(each) for each in layers]

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        return self.file.get(f"{self.architecture}.{name}", str, default)

    def _value(self, name: str, default: object) -> object:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise self.invalid(f"it has no {self.architecture}.{name}")
        return value

    def has_tensor(self, name: str) -> bool:
        """Whether the file has the tensor."""
        return name in self.file.tensors

    def shape(self, name: str, least: int = 1) -> tuple[int, ...]:
        """A tensor's shape, of ``least`` dimensions or more."""
        if name not in self.file.tensors:
            raise self.invalid(f"it has no tensor {name}")
        shape = self.file.tensors[name].shape
        if len(shape) < least:
            raise self.invalid(f"{name} has the shape {list(shape)}")
        return shape

    @property
    def num_layers(self) -> int:
        """Decoder layers, without those that only draft (``nextn``), which come last."""
        total = self.whole("block_count")
        if total > _MOST_LAYERS:
            raise self.invalid(f"{self.architecture}.block_count is {total}")
        drafts = self.whole("nextn_predict_layers", 0, 0)
        if drafts >= total:
            raise self.invalid(f"{drafts} of its {total} layers only draft")
        return total - drafts

    @property
    def num_heads(self) -> int:
        """Attention heads, of layers that have attention."""
        return self._largest("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads, of layers that have attention."""
        if not self.has("attention.head_count_kv"):
            return self.num_heads
        return self._largest("attention.head_count_kv")

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        width = self.whole("embedding_length") // self.num_heads
        dims = self.whole("attention.key_length", max(width, 1))
        if self.whole("attention.value_length", dims) != dims:
            raise UnsupportedModelError(
                f"{self.file.path}: heads whose keys and values differ in size are not supported",
                _REMEDY,
            )
        return dims

    def _largest(self, name: str) -> int:
        """A number that is the same in all layers that have attention, and 0 in the others."""
        counts = set(self.wholes(name, self.num_layers)) - {0}
        if len(counts) != 1:
            raise UnsupportedModelError(
                f"{self.file.path}: layers that differ in {self.architecture}.{name} are not "
                "supported",
                _REMEDY,
            )
        count = counts.pop()
        if count > _MOST_HEADS:
            raise self.invalid(f"{self.architecture}.{name} is {count}")
        return count


def _shortest(value: float) -> float:
    """A float32 as the shortest decimal number that stands for it: 1e-05, as it was written."""
    if abs(value) > _LARGEST_FLOAT32:
        return value
    single = struct.pack("<f", value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((each for each in shorter if struct.pack("<f", each) == single), value)
