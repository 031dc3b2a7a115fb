"""Causal convolutions over the tokens of a sequence, channel by channel.

The state of a convolution of k taps is the last k - 1 inputs of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from tgi_cli.attention import StateCache, StateTensor
from tgi_cli.layers import recurrent
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.linear import Projection


class CausalConv(Loadable):
    """A depthwise causal convolution: x [T, channels] -> [T, channels] of this shard.

    Its weights are ``parts``, as those of a column-parallel linear layer, each [channels, 1, size]
    in the checkpoint, side by side in the order of the channels. A part named "" is the layer
    itself.

    Args:
        build: dtype, shard.
        parts: names beside the layer's own, with their channels.
        size: taps, the current token's included.
        bias: whether channels have one.
        activation: activation of the outputs, ``silu`` or none.
    """

    def __init__(
        self,
        build: Build,
        parts: Mapping[str, Projection],
        size: int,
        *,
        bias: bool = False,
        activation: str | None = "silu",
    ) -> None:
        super().__init__()
        self.parts = {
            name: (part, build.shard.share(part.size, part.units)) for name, part in parts.items()
        }
        channels = sum(own.stop - own.start for _, own in self.parts.values())
        self.size = size
        self.activation = activation
        # Tap by tap, so that the channels of a token are contiguous, as they are in its inputs.
        self.weight = empty_parameter(size, channels, dtype=torch.float32)
        self.bias = empty_parameter(channels, dtype=torch.float32) if bias else None
        self.state = StateTensor("conv", (size - 1, channels), build.dtype)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        parent = path.rpartition(".")[0]
        start = 0
        for name, (part, own) in self.parts.items():
            full = ".".join(filter(None, (parent, name))) if name else path
            at = slice(start, start + own.stop - own.start)
            fill = partial(self._fill, at, own)
            yield WeightSlot(f"{full}.weight", (part.size, 1, self.size), fill)
            if self.bias is not None:
                yield self.slot(f"{full}.bias", "bias", (part.size,), own, at)
            start = at.stop

    def _fill(self, at: slice, own: slice, tensor: Tensor) -> None:
        self.weight[:, at].copy_(tensor[own, 0].T)

    def forward(self, x: Tensor, states: StateCache, layer: int) -> Tensor:
        """``layer`` is the index of the state that the layer has in ``states``."""
        return recurrent.causal_conv(x, self.weight, self.bias, self.activation, states, layer)
