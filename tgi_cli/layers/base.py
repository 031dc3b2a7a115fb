"""What every layer with weights has in common: it knows which tensors it wants, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.kernels.linear import PackedMatrix
from tgi_cli.quantization import QuantizationMethod

if TYPE_CHECKING:
    from tgi_cli.layers.lora import LoraTable


@dataclass(frozen=True, slots=True)
class Build:
    """How the layers of a model are made."""

    dtype: torch.dtype
    quantization: QuantizationMethod
    shard: Shard = ALONE
    """Which share of the weights is this process's."""
    lora: LoraTable | None = None
    """Where the adapters of a step stand; None: there are none."""
    max_positions: int | None = None
    """The context that is served; None: the model's."""
    head: QuantizationMethod | None = None
    """Of the output head, which is quantized by it; None: that of the other layers, by which it is
    quantized only where the checkpoint has it so."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A tensor that a layer wants.

    ``name`` is the model's for it, ``shape`` that of the whole, whatever share of it this
    process keeps. ``fill`` takes it whole, on the CPU and in any dtype, and copies that share
    into place: of a tensor in a mapped file the rest is never read.
    """

    name: str
    shape: tuple[int, ...]
    fill: Callable[[Any], object]
    keep: Callable[[Tensor], bool] | None = None
    """Offered the tensor in its mapped file instead; whether that was taken in place of a copy."""
    coded: bool = False
    """Whether ``fill`` takes quantized weights as they are, :class:`Codes`, too."""


class Loadable(nn.Module):
    """A layer whose parameters stand on the meta device until they are loaded.

    Per layer: ``materialize``, then every slot's ``fill``, then ``finish``; so a loader can
    complete one layer before it touches the next. Attributes that are not parameters
    (``packed``) are plain tensors.
    """

    packed: Tensor | PackedMatrix | None = None

    @property
    def loads_after(self) -> Loadable | None:
        """The layer that must be loaded before this one, and should be right before it."""
        return None

    def slots(self, path: str) -> Iterator[WeightSlot]:
        """The tensors that the layer at ``path`` (its name in the model) wants."""
        raise NotImplementedError

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
