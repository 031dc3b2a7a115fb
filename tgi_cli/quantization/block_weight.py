"""A weight in blocks of a GGUF file, which are packed for kernels or decoded when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tgi_cli.gguf.tensor_types import TensorType
from tgi_cli.kernels.gguf_packing import pack_blocks
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization.gguf import LAYOUTS, block_form, read_blocks
from tgi_cli.quantization.quantized_weight import QuantizedWeight
from tgi_cli.quantization.widening import reorder_inputs

_DECODED_ELEMENTS = 1 << 22
"""Elements that are decoded at a time to be dequantized."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight [out, in], of a type of :data:`tgi_cli.quantization.gguf.LAYOUTS`.

    Attributes:
        kind: the type.
        parts: uint8 [outputs, bytes of a row], whose outputs follow each other; of a mapped file
            as a rule.
    """

    kind: TensorType
    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        blocks = self.parts[0].shape[1] // self.kind.size
        return sum(len(part) for part in self.parts), blocks * self.kind.elements

    def __getitem__(self, key: Any) -> BlockWeight | QuantizedWeight:
        """Slice outputs (one slice), or outputs and inputs (two slices), as of a tensor.

        Inputs that are not whole blocks are taken of the decoded weight.
        """
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        start, stop, _ = columns.indices(self.shape[1])
        elements, size = self.kind.elements, self.kind.size
        if start % elements or stop % elements:
            return self.decode()[rows, columns]
        inner = slice(start // elements * size, stop // elements * size)
        return replace(self, parts=(self._whole()[rows, inner],))

    def rows(self, select: Callable[[Tensor], Tensor]) -> BlockWeight:
        """Apply ``select``, which maps tensors [out, ...] to some of their outputs."""
        return replace(self, parts=(select(self._whole()).contiguous(),))

    def padded(self, rows: int) -> BlockWeight:
        """Append outputs of 0, up to ``rows``: blocks of zeros have the scale 0."""
        missing = rows - self.shape[0]
        if not missing:
            return self
        zeros = self.parts[0].new_zeros(missing, self.parts[0].shape[1])
        return replace(self, parts=(*self.parts, zeros))

    def reordered(self, order: Sequence[int]) -> QuantizedWeight:
        """With equal stretches of inputs, as many as ``order`` has, in another order."""
        return reorder_inputs(self.decode(), order)

    def decode(self) -> QuantizedWeight:
        """Codes and scales, in memory."""
        return read_blocks(self.kind, self.shape, self._whole().flatten())

    def dequantize(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """As :meth:`QuantizedWeight.dequantize`; blocks are decoded where they are."""
        whole = self._whole()
        out = torch.empty(self.shape, dtype=dtype, device=device or whole.device)
        step = max(1, _DECODED_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, len(whole), step):
            rows = slice(start, start + step)
            part = replace(self, parts=(whole[rows],))
            out[rows] = part.decode().dequantize(dtype, device)
        return out

    def can_be_packed(self) -> bool:
        """Whether :meth:`pack` takes it: an output needs several groups."""
        return self.shape[1] > LAYOUTS[self.kind.name].group

    def pack(self, paired: bool) -> PackedMatrix:
        """For the CPU's kernels, straight from the blocks.

        Raises:
            RuntimeError: there are no kernels here.
        """
        return pack_blocks(block_form(self.kind), self.parts, self.shape[1], paired)

    def is_like(self, other: BlockWeight) -> bool:
        """Whether the outputs of both can be concatenated."""
        return self.kind == other.kind and self.shape[1] == other.shape[1]

    def _whole(self) -> Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)


CodedWeight = QuantizedWeight | BlockWeight
"""A quantized weight, decoded or not."""


def decoded(weight: CodedWeight) -> QuantizedWeight:
    """The codes and scales of either."""
    return weight.decode() if isinstance(weight, BlockWeight) else weight


def concat_blocks(weights: Sequence[BlockWeight]) -> BlockWeight:
    """Concatenate the outputs of ``weights``, which are alike, without a copy."""
    return replace(weights[0], parts=tuple(part for each in weights for part in each.parts))
