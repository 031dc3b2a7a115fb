"""A tensor of a checkpoint, known from its file's header alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tgi_cli.quantization.block_weight import CodedWeight

QUANTIZED = "quantized"
"""The dtype of weights that consist of several tensors."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint, known from its file's header.

    A quantized weight counts as one: it is read from its ``parts``. So do rows of one matrix of a
    stack: they are a ``part`` of the tensor ``name`` (its index, the first row and the last + 1).
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...] = ()
    read: Callable[..., Tensor | CodedWeight] | None = None
    about: str = ""
    """Description of a quantized weight, for reports."""
    part: tuple[int, int, int] | None = None
    span: tuple[int, int] | None = None
    """Offset and size of its bytes, of a file that is not safetensors."""

    @property
    def pieces(self) -> tuple[StoredTensor, ...]:
        """The tensors of files that it is read from."""
        return (self,) if self.read is None else self.parts
