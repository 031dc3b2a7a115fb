"""Recurrent states: what layers keep of a sequence in a size that does not grow with its length.

Convolutions keep their last inputs, linear attention and state space models a matrix per head. The
states of a sequence live in a *slot*: one index into the tensors of every layer. A sequence in a
step reads one slot and writes another, or the same one, so a fork or a prefix hit reads a shared
slot and writes its own without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tgi_cli.attention.memory import empty
from tgi_cli.attention.state_chunks import Entry, StepChunks
from tgi_cli.kernels.recurrence import StepSlots


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state, of this shard.

    Attributes:
        name: by which the layer finds it, such as ``conv`` or ``recurrent``.
        shape: shape of one sequence's state.
        dtype: in which it is kept.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one layer keeps of a sequence beside keys and values."""

    tensors: tuple[StateTensor, ...]


@dataclass(slots=True)
class StateMetadata:
    """The slots of a step of B sequences, in the order of the flat batch.

    Tensors are on the model's device, lists on the host.

    Attributes:
        query_start_loc: int32 [B+1], as of :class:`~tgi_cli.attention.AttentionMetadata`.
        slots_in: int64 [B], read before a sequence's first token; -1 for a fresh state of zeros.
        slots_out: int64 [B], written after its last token; -1 for none (padding).
        snapshot_after: int64 [B], how many of its tokens precede its snapshot; 0 for none.
        snapshot_slots: int64 [B], written after those tokens; -1 for none.
        query_lens_host: tokens of each sequence.
        slots_in_host, slots_out_host, snapshot_after_host, snapshot_slots_host: the same values;
            empty where the device alone knows them (:meth:`of_decodes`).
    """

    query_start_loc: Tensor
    slots_in: Tensor
    slots_out: Tensor
    snapshot_after: Tensor
    snapshot_slots: Tensor
    query_lens_host: list[int]
    slots_in_host: list[int]
    slots_out_host: list[int]
    snapshot_after_host: list[int]
    snapshot_slots_host: list[int]
    _for_kernels: StepSlots | None = field(default=None, init=False, repr=False, compare=False)
    _chunks: StepChunks | None = field(default=None, init=False, repr=False, compare=False)
    _has_chunks: bool | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        query_lens: list[int],
        slots_in: list[int],
        slots_out: list[int],
        device: torch.device,
        snapshots: Mapping[int, tuple[int, int]] | None = None,
    ) -> StateMetadata:
        """From values on the host; ``snapshots`` has (tokens, slot) by index of the sequence."""
        made = [(snapshots or {}).get(index, (0, -1)) for index in range(len(query_lens))]
        after, kept = [count for count, _ in made], [slot for _, slot in made]
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        numbers = torch.tensor([slots_in, slots_out, after, kept], device=device)
        return cls(
            query_start_loc=starts.to(device),
            slots_in=numbers[0],
            slots_out=numbers[1],
            snapshot_after=numbers[2],
            snapshot_slots=numbers[3],
            query_lens_host=query_lens,
            slots_in_host=slots_in,
            slots_out_host=slots_out,
            snapshot_after_host=after,
            snapshot_slots_host=kept,
        )

    @classmethod
    def of_decodes(cls, slots_in: Tensor, slots_out: Tensor) -> StateMetadata:
        """A step of one token per sequence, whose slots the host does not know.

        For CUDA graphs, which read ``slots_in`` and ``slots_out`` (int64 [B]) at each replay.
        """
        rows = len(slots_in)
        return cls(
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=slots_in.device),
            slots_in=slots_in,
            slots_out=slots_out,
            snapshot_after=torch.zeros_like(slots_in),
            snapshot_slots=torch.full_like(slots_in, -1),
            query_lens_host=[1] * rows,
            slots_in_host=[],
            slots_out_host=[],
            snapshot_after_host=[],
            snapshot_slots_host=[],
        )

    @property
    def on_host(self) -> bool:
        """Whether the host knows the slots."""
        return len(self.slots_out_host) == len(self.query_lens_host)

    @property
    def has_snapshots(self) -> bool:
        """Whether any sequence of the step leaves a snapshot."""
        return any(slot >= 0 for slot in self.snapshot_slots_host)

    def for_kernels(self) -> StepSlots:
        """The slots as the CPU's kernels take them."""
        if self._for_kernels is None:
            slots = (self.slots_in, self.slots_out, self.snapshot_after, self.snapshot_slots)
            self._for_kernels = StepSlots.of(sum(self.query_lens_host), self.query_start_loc, slots)
        return self._for_kernels

    def chunks(self) -> StepChunks | None:
        """The prompts of the step, for kernels that take them in chunks; None if there are none."""
        if self._has_chunks is None:
            columns = (
                self.query_lens_host,
                self.slots_in_host,
                self.slots_out_host,
                self.snapshot_after_host,
                self.snapshot_slots_host,
            )
            entries = [Entry(*row) for row in zip(*columns, strict=True)] if self.on_host else []
            self._chunks = StepChunks.of(entries, self.slots_in.device)
            self._has_chunks = self._chunks is not None
        return self._chunks

    def leading(self, count: int) -> StateMetadata:
        """The first ``count`` sequences as a step of their own."""
        return replace(
            self,
            query_start_loc=self.query_start_loc[: count + 1],
            slots_in=self.slots_in[:count],
            slots_out=self.slots_out[:count],
            snapshot_after=self.snapshot_after[:count],
            snapshot_slots=self.snapshot_slots[:count],
            query_lens_host=self.query_lens_host[:count],
            slots_in_host=self.slots_in_host[:count],
            slots_out_host=self.slots_out_host[:count],
            snapshot_after_host=self.snapshot_after_host[:count],
            snapshot_slots_host=self.snapshot_slots_host[:count],
        )


class StateCache:
    """The states of all layers, slot by slot.

    :meth:`allocate` once, then one :meth:`plan` per step. Layers read and write ``tensors`` through
    the step's slots: kernels do so themselves, others use :meth:`load` and :meth:`store`.

    Attributes:
        specs: one per layer that has a state, in the order of their indices.
        tensors: per layer, by name: [slots, *shape].
        step: the slots of the step that is planned.
        chunked: whether kernels on CUDA may carry states over prompts in chunks of tokens; set it
            before the first step.
    """

    def __init__(self, specs: Sequence[StateSpec], device: torch.device) -> None:
        self.specs = tuple(specs)
        self.device = device
        self.num_slots = 0
        self.tensors: list[dict[str, Tensor]] = []
        self.step: StateMetadata | None = None
        self.chunked = False

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(tensor.nbytes for spec in self.specs for tensor in spec.tensors)

    def allocate(self, num_slots: int) -> None:
        """Allocate ``num_slots`` slots; earlier states are lost.

        On a CPU the memory is taken from the system page by page as it is written.
        """
        self.tensors = []
        self.num_slots = num_slots
        for spec in self.specs:
            self.tensors.append(
                {
                    tensor.name: empty((num_slots, *tensor.shape), tensor.dtype, self.device)
                    for tensor in spec.tensors
                }
            )

    def plan(self, metadata: StateMetadata) -> None:
        """Set the slots that all layers of a step use."""
        self.step = metadata

    @property
    def planned(self) -> StateMetadata:
        """The step that is planned."""
        assert self.step is not None
        return self.step

    @property
    def in_chunks(self) -> bool:
        """Whether kernels on CUDA take prompts of the planned step in chunks of tokens."""
        return self.chunked and self.planned.chunks() is not None

    def step_on_host(self) -> StateMetadata:
        """The planned step, for operations that read slots on the host.

        Raises:
            RuntimeError: the host does not know them, as a CUDA graph is to hold the step.
        """
        step = self.planned
        if not step.on_host:
            raise RuntimeError("a layer reads the slots of its states on the host")
        return step

    def load(self, layer: int, name: str) -> Tensor:
        """A copy of the states before the step, [B, *shape]; zeros for fresh ones."""
        assert self.step is not None
        slots = self.step.slots_in
        states = self.tensors[layer][name].index_select(0, slots.clamp_min(0))
        fresh = (slots < 0).view(-1, *[1] * (states.ndim - 1))
        # Not by a product: an unused slot may hold NaN.
        return states.masked_fill_(fresh, 0)

    def store(self, layer: int, name: str, states: Tensor, *, snapshots: bool = False) -> None:
        """Keep the states after the step, [B, *shape], or those of its snapshots."""
        step, target = self.step_on_host(), self.tensors[layer][name]
        slots = step.snapshot_slots if snapshots else step.slots_out
        states = states.to(target.dtype)
        if min(step.snapshot_slots_host if snapshots else step.slots_out_host) >= 0:
            target.index_copy_(0, slots, states)  # a mask would wait for the device
        else:
            kept = slots >= 0
            target[slots[kept]] = states[kept]

    def advance(self, layer: int, name: str, run: Callable[[slice, Tensor], object]) -> None:
        """Carry each sequence's state over its tokens, one sequence after the other.

        ``run(tokens, state)`` updates a state [*shape] in place by these tokens of the flat batch.
        A sequence that leaves a snapshot is run in two parts. No slot may be one that a sequence of
        the step reads and another one writes.
        """
        step = self.step_on_host()
        states = self.tensors[layer][name]
        start = 0
        for length, source, target, after, snapshot in zip(
            step.query_lens_host,
            step.slots_in_host,
            step.slots_out_host,
            step.snapshot_after_host,
            step.snapshot_slots_host,
            strict=True,
        ):
            # States are megabytes: one that stays in its slot is not copied.
            state = states[target] if target >= 0 else torch.empty_like(states[0])
            if source < 0:
                state.zero_()
            elif source != target:
                state.copy_(states[source])
            if snapshot >= 0:
                run(slice(start, start + after), state)
                states[snapshot].copy_(state)
                run(slice(start + after, start + length), state)
            else:
                run(slice(start, start + length), state)
            start += length
