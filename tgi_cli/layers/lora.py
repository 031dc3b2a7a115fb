"""LoRA adapters (https://arxiv.org/abs/2106.09685) beside the weights they change, many in a batch.

Every linear layer stores the A and B matrices of all *slots* side by side, as if they were one
adapter with the sum of their ranks. A step then takes two products for any mix of adapters:

    y += ((x A^T) where the token's slot is the column's, else 0) B^T

No token is gathered and the host is not needed, so that the shapes depend on the number of tokens
alone. An adapter's scale is part of its B. On a CPU, where a column costs time even if
no token uses it, the products are of the columns between the first and the last slot in use. On
CUDA, Triton multiplies each token with its own slot's columns alone
(:mod:`tgi_cli.layers.triton_lora`), which has not been measured.

Milliseconds of a decode step of a 135M Llama in bf16 on one core, adapters of rank 16 on all
linear layers (``python -m tests.benchmarks.lora``):

========  =========  ==========  =========  ==========  ==========
rows      no slots   unused      1 adapter  2 adapters  4 adapters
========  =========  ==========  =========  ==========  ==========
1         33.8       32.7        39.9
4         32.4       30.7        39.4       42.7        47.7
32        83.3       82.7        98.8       105.3       115.5
========  =========  ==========  =========  ==========  ==========
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_cli.layers import ops


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Outputs of a linear layer that adapters name apart.

    Attributes:
        name: beside the layer's own; "": the layer itself.
        size: over all shards.
        own: which of them are this shard's.
        at: the position of these in the layer's output.
    """

    name: str
    size: int
    own: slice
    at: slice


@dataclass(frozen=True, slots=True)
class LoraPair:
    """This shard's share of an adapter's matrices for one part of a layer.

    ``a`` [r, inputs] and ``b`` [r, outputs] (B transposed, times the adapter's scale), in the
    table's dtype.
    """

    layer: LoraLayer
    part: int
    a: Tensor
    b: Tensor


class LoraLayer:
    """The slots of one linear layer.

    Args:
        table: table of the model.
        in_features: over all shards.
        inputs: which of them are this shard's.
        parts: see :class:`LoraPart`.
    """

    def __init__(
        self, table: LoraTable, in_features: int, inputs: slice, parts: Sequence[LoraPart]
    ) -> None:
        self.table = table
        self.in_features = in_features
        self.inputs = inputs
        self.parts = list(parts)
        self.a = torch.empty(0)
        self.b: list[Tensor] = []
        self._columns: slice | None = None
        self._view_a = self.a
        self._view_b = self.b
        self._whole_b = self.a
        self._owners = self.a

    def allocate(self, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        """Memory for so many columns: A [parts, columns, inputs], B^T [columns, outputs] each."""
        width = self.inputs.stop - self.inputs.start
        self.a = torch.zeros(len(self.parts), columns, width, dtype=dtype, device=device)
        if device.type == "cpu":
            self.b = [
                torch.zeros(columns, part.own.stop - part.own.start, dtype=dtype)
                for part in self.parts
            ]
        else:  # side by side, for one launch
            outputs = self.parts[-1].at.stop
            self._whole_b = torch.zeros(columns, outputs, dtype=dtype, device=device)
            self.b = [self._whole_b[:, part.at] for part in self.parts]
            self._owners = torch.empty(outputs, dtype=torch.int32, device=device)
            for number, part in enumerate(self.parts):
                self._owners[part.at] = number
        self._columns = None

    def _view(self, columns: slice) -> None:
        """Prepare for these columns: most steps want those of the step before."""
        self._columns = columns
        self._view_a = self.a[:, columns].transpose(1, 2)
        self._view_b = [b[columns] for b in self.b]

    def add_(self, y: Tensor, x: Tensor) -> None:
        """Add to ``y`` [T, this shard's outputs] what each token's adapter makes of ``x``.

        ``x`` [T, this shard's inputs]. Where inputs are shared out, the sum over the shards is
        still to be taken, as it is of ``y``.
        """
        columns, sorted_rows = self.table.columns, self.table.sorted_rows
        if columns is None:
            return
        if sorted_rows is not None:
            from tgi_cli.layers import triton_lora

            triton_lora.add_(y, x, self.a, self._whole_b, self._owners, *sorted_rows)
            return
        if columns != self._columns:
            self._view(columns)
        inner = torch.matmul(x.to(self._view_a.dtype), self._view_a)
        if self.table.foreign is not None:
            inner.masked_fill_(self.table.foreign, 0)
        single = len(self.parts) == 1
        for part, product, b in zip(self.parts, inner, self._view_b, strict=True):
            own = y if single else y[:, part.at]
            if own.dtype == b.dtype:
                own.addmm_(product, b)
            else:
                own.add_(torch.mm(product, b))


class LoraTable:
    """The slots of a model's layers, and which of them a step uses.

    On a CPU adapters are stored and applied in float32 whatever the model's dtype: for two narrow
    matrices the overhead of bf16 kernels is large (4 tokens, [16, 576] and [1536, 16]: 34 and 27 us
    of two cores, in float32 10 and 10).

    Args:
        slots: adapters in one step at most.
        rank: largest rank of an adapter.
        max_tokens: most tokens of a step.

    Attributes:
        dtype: dtype of the matrices, from :meth:`allocate` on.
        columns: of the layers' matrices that the step needs, or None if it has no adapters.
        foreign: bool [T, columns], the columns that are not of the token's own adapter, or None if
            all tokens have the same adapter.
        sorted_rows: on CUDA with Triton, the end of each slot's tokens (int32 [slots]), and the
            tokens sorted by slot (int32 [T]); else None.
    """

    def __init__(self, slots: int, rank: int, max_tokens: int) -> None:
        self.slots = slots
        self.rank = rank
        self.max_tokens = max_tokens
        self.layers: list[LoraLayer] = []
        self.dtype = torch.float32
        self.columns: slice | None = None
        self.foreign: Tensor | None = None
        self._ranks = [rank] * slots
        self.sorted_rows: tuple[Tensor, Tensor] | None = None
        self._owners = torch.empty(0)
        self._foreign: Tensor | None = None
        self._sorted: tuple[Tensor, Tensor] | None = None

    def layer(
        self, in_features: int, inputs: slice, parts: Mapping[str, tuple[int, slice]]
    ) -> LoraLayer:
        """Slots for a layer; ``parts`` are size and own outputs by name, in their order."""
        placed, start = [], 0
        for name, (size, own) in parts.items():
            end = start + own.stop - own.start
            placed.append(LoraPart(name, size, own, slice(start, end)))
            start = end
        layer = LoraLayer(self, in_features, inputs, placed)
        self.layers.append(layer)
        return layer

    @torch.inference_mode()
    def allocate(self, dtype: torch.dtype, device: torch.device) -> int:
        """Take the memory of all slots of all layers; returns its bytes."""
        columns = self.slots * self.rank
        self.dtype = torch.float32 if device.type == "cpu" else dtype
        for layer in self.layers:
            layer.allocate(columns, self.dtype, device)
        self._owners = torch.arange(self.slots, dtype=torch.int32, device=device)
        self._owners = self._owners.repeat_interleave(self.rank)
        if device.type == "cuda" and ops.triton_kernels() is not None:
            self._sorted = (
                torch.zeros(self.slots, dtype=torch.int32, device=device),
                torch.zeros(self.max_tokens, dtype=torch.int32, device=device),
            )
        elif device.type != "cpu":
            shape = (self.max_tokens, columns)
            self._foreign = torch.empty(shape, dtype=torch.bool, device=device)
        return sum(
            tensor.numel() * tensor.dtype.itemsize
            for layer in self.layers
            for tensor in (layer.a, *layer.b)
        )

    @torch.inference_mode()
    def put(self, slot: int, pairs: Sequence[LoraPair]) -> None:
        """Fill a slot, whose previous adapter no later step uses.

        B of the layers that the adapter leaves alone need no clearing: zeros are all that is
        multiplied by it, and it is finite.
        """
        start = slot * self.rank
        for layer in self.layers:
            layer.a[:, start : start + self.rank].zero_()
        for pair in pairs:
            end = start + len(pair.a)
            pair.layer.a[pair.part, start:end].copy_(pair.a, non_blocking=True)
            pair.layer.b[pair.part][start:end].copy_(pair.b, non_blocking=True)
        self._ranks[slot] = max((len(pair.a) for pair in pairs), default=0)

    def plan(self, used: Sequence[int], token_slots: Tensor | None) -> None:
        """Prepare a step.

        Args:
            used: the distinct slots of its tokens, ascending; -1 for tokens without adapter.
            token_slots: int32 [T], of each token; None if no token has an adapter.
        """
        slots = [slot for slot in used if slot >= 0]
        if not slots or token_slots is None:
            self.columns = self.foreign = self.sorted_rows = None
        elif self._sorted is not None:  # the same memory in every step, as graphs need it
            from tgi_cli.layers.triton_sort import sort_pairs

            ends, tokens = self._sorted
            self.columns = slice(0, self.slots * self.rank)
            self.sorted_rows = ends, tokens[: len(token_slots)]
            sort_pairs(token_slots, self.slots, self.sorted_rows)
        elif self._foreign is not None:  # the same shapes and the same memory in every step
            self.columns = slice(0, self.slots * self.rank)
            own = self._foreign[: len(token_slots)]
            self.foreign = torch.ne(token_slots[:, None], self._owners, out=own)
        else:
            last = slots[-1]
            self.columns = slice(slots[0] * self.rank, last * self.rank + self._ranks[last])
            every = len(used) == 1
            owners = self._owners[self.columns]
            self.foreign = None if every else token_slots[:, None] != owners
