"""Linear layers, whole or split: by their outputs (column) or by their inputs (row).

A column-parallel layer followed by a row-parallel one needs a single sum over the shards
(Megatron-LM, https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.quantization.block_weight import CodedWeight
from tgi_cli.quantization.few_rows import FewRows

if TYPE_CHECKING:
    from tgi_cli.layers.lora import LoraLayer


@dataclass(frozen=True, slots=True)
class Projection:
    """One of the linear layers that are merged into one."""

    size: int
    """Outputs over all shards."""
    units: int | None = None
    """Pieces that stay whole on a shard (attention heads). Default: single outputs."""


class LinearBase(Loadable):
    """A weight [out, in] of this shard, stored and applied by the model's quantization method."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    lora: LoraLayer | None = None
    """What adapters add; None if the model has no slots for adapters."""
    exempt = False
    """Whether loading leaves a plain weight unquantized, even with ``--quantize``."""
    paired = False
    """Whether the outputs are a gate's and then as many that it gates: they may then be packed
    side by side, so that one kernel can compute both and their product."""
    few_rows: FewRows | None = None
    """Products with few rows on a GPU, as measured at warm-up."""

    def __init__(self, build: Build, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = build.dtype
        self.method = build.quantization
        self.method.create_weights(self, out_features, in_features, build.dtype)
        self.bias = empty_parameter(out_features, dtype=build.dtype) if bias else None

    def finish(self) -> None:
        self.method.process_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self.method.apply(self, x, bias)
        if self.lora is not None:
            self.lora.add_(y, x)
        return y


class ColumnParallelLinear(LinearBase):
    """Linear layers over one input, computed as one; each shard has some outputs of each.

    Merging q, k and v (and gate and up) saves a third of their time at one token, where each
    product pays about 10 us besides reading its weight.

    ``parts`` maps names beside the layer's own (``q_proj`` beside ``qkv_proj``) to outputs, in
    the order of these in the layer's output: x [T, in_features] -> [T, this shard's outputs].
    A part named "" is the layer itself.
    """

    def __init__(
        self, build: Build, in_features: int, parts: Mapping[str, Projection], bias: bool
    ) -> None:
        self.parts = {
            name: (part, build.shard.share(part.size, part.units)) for name, part in parts.items()
        }
        total = sum(own.stop - own.start for _, own in self.parts.values())
        super().__init__(build, in_features, total, bias)
        if build.lora is not None:
            outputs = {name: (part.size, own) for name, (part, own) in self.parts.items()}
            self.lora = build.lora.layer(in_features, slice(0, in_features), outputs)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        parent = path.rpartition(".")[0]
        start = 0
        for name, (part, own) in self.parts.items():
            full = ".".join(filter(None, (parent, name))) if name else path
            at = slice(start, start + own.stop - own.start)
            fill = partial(self._fill_weight, at, own)
            yield WeightSlot(
                f"{full}.weight", (part.size, self.in_features), fill, takes_quantized=True
            )
            if self.bias is not None:
                yield self.slot(f"{full}.bias", "bias", (part.size,), own, at)
            start = at.stop

    def _fill_weight(self, at: slice, own: slice, weight: Tensor | CodedWeight) -> None:
        self.method.fill(self, at, weight[own])


class RowParallelLinear(LinearBase):
    """A linear layer whose inputs are split: x [T, this shard's inputs] -> [T, out_features].

    The shards' products are summed up, the bias is added by the first. ``units``: pieces of the
    input that stay whole, as the column-parallel layer before it has them.
    """

    def __init__(
        self,
        build: Build,
        in_features: int,
        out_features: int,
        bias: bool,
        units: int | None = None,
    ) -> None:
        self.own = build.shard.share(in_features, units)
        self.full_in_features = in_features
        super().__init__(build, self.own.stop - self.own.start, out_features, bias)
        self.shard: Shard = build.shard
        if build.lora is not None:
            outputs = {"": (out_features, slice(0, out_features))}
            self.lora = build.lora.layer(in_features, self.own, outputs)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        shape = (self.out_features, self.full_in_features)
        yield WeightSlot(f"{path}.weight", shape, self._fill_weight, takes_quantized=True)
        if self.bias is not None:
            yield self.slot(f"{path}.bias", "bias", (self.out_features,))

    def _fill_weight(self, weight: Tensor | CodedWeight) -> None:
        self.method.fill(self, slice(0, self.out_features), weight[:, self.own])

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.shard.rank == 0 else None
        return self.shard.all_reduce(self._product(x, bias))


class ReplicatedLinear(ColumnParallelLinear):
    """A linear layer that every shard has whole: x [T, in_features] -> [T, out_features]."""

    def __init__(self, build: Build, in_features: int, out_features: int, bias: bool) -> None:
        whole = replace(build, shard=ALONE)
        super().__init__(whole, in_features, {"": Projection(out_features)}, bias)
