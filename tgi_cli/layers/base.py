"""What layers with weights have in common: slots for the tensors that a loader fills in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization import QuantizationMethod

if TYPE_CHECKING:
    from tgi_cli.layers.lora import LoraTable


_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Build:
    """How the layers of a model are made."""

    dtype: torch.dtype
    quantization: QuantizationMethod
    shard: Shard = ALONE
    """This process's share of the weights."""
    lora: LoraTable | None = None
    """Slots for adapters; None if there are none."""
    max_positions: int | None = None
    """The context that is served. Default: the model's."""
    head: QuantizationMethod | None = None
    """Quantizes the output head. Default: ``quantization``, which quantizes a head only if the
    checkpoint does."""
    layers: range | None = None
    """The decoder's layers of this process's stage. Default: all."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A tensor that a layer needs.

    ``name`` is the model's name for it, ``shape`` that of the whole tensor, whatever this
    process's share of it is. ``fill`` takes the whole, on the CPU and in any dtype, and copies the
    share; the rest of a tensor in a mapped file is never read.
    """

    name: str
    shape: tuple[int, ...]
    fill: Callable[[Any], object]
    keep: Callable[[Tensor], bool] | None = None
    """Gets the tensor in its mapped file; returns whether the layer uses it there, uncopied."""
    takes_quantized: bool = False
    """Whether ``fill`` also takes a ``QuantizedWeight``, as it is."""
    integers: bool = False
    """Whether it is a table of integers, and not a weight."""


class Loadable(nn.Module):
    """A layer whose parameters are on the meta device until they are loaded.

    Per layer: ``materialize``, then every slot's ``fill``, then ``finish``; so a loader can
    complete one layer before it touches the next. Attributes that are not parameters
    (``packed``) are plain tensors.
    """

    packed: Tensor | PackedMatrix | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of weights that are not parameters."""
        return 0 if self.packed is None else self.packed.nbytes

    @property
    def loads_after(self) -> Loadable | None:
        """The layer that must be loaded before this one, preferably right before it."""
        return None

    def slots(self, path: str) -> Iterator[WeightSlot]:
        """The tensors of the layer at ``path``, its name in the model."""
        raise NotImplementedError

    def slot(
        self, name: str, attribute: str, shape: tuple[int, ...], own: slice = _ALL, at: slice = _ALL
    ) -> WeightSlot:
        """A slot that copies rows ``own`` of a tensor to rows ``at`` of a parameter."""

        def fill(tensor: Tensor) -> None:
            getattr(self, attribute)[at].copy_(tensor[own])

        return WeightSlot(name, shape, fill)

    def materialize(self, device: torch.device) -> None:
        """Give the parameters memory on ``device``; their values are arbitrary."""
        for name, parameter in self.named_parameters(recurse=False):
            # Not empty_like: from meta it goes through torch's Python references, whose
            # import costs 33 MB.
            real = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(self, name, nn.Parameter(real, requires_grad=False))

    def finish(self) -> None:
        """Called once all slots are filled."""


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory, to be materialized."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)
