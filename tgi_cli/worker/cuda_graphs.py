"""CUDA graphs of decode steps: recorded once per padded number of rows, then repeated.

A decode step is some hundred kernels that take microseconds each: if the host launches them one
by one, it is slower than the device. A graph launches them at once, always on the same memory
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). So a step is here:

======================  ==============================================================
on the host             one column of numbers per row, in a pinned buffer; padding columns
one copy                the buffer to a tensor that the graphs read
in the graph            token ids from the pool, block tables from the rows', the model, which
                        reads and writes slots of states, the head (where its logits are few)
in a second graph       the likeliest tokens, their log-probabilities, and their way into the pool,
                        of steps that want no more; else the sampler follows, over the rows
                        without padding. On several shards the head, too: each computes its part
                        of the logits, and all choose together
======================  ==============================================================

No value that varies is a constant in a graph. The copies and the graphs run in order on one
stream, so a step may be prepared while the one before it runs. The same order ensures that a
graph's result is used before the next graph overwrites it. Chosen tokens alone are read out of
order: they are copied to the host on another stream, while the next step's first graph may run. So
they are outside the memory of the graphs, which any graph may write, and the next choice waits for
the copy. Steps with prompts have graphs of their own (:mod:`tgi_cli.worker.mixed_graphs`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention, StateMetadata
from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker.executors import ForwardOutput, RunnableModel
from tgi_cli.worker.graph_capture import Graph, GraphSet, cuda_graphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.step_inputs import StepBatch

LARGEST = 512
"""Rows of the largest graph by default: in larger batches the host is faster than the device."""

MAX_HEAD_ROWS = 64
MAX_HEAD_LOGITS = 1 << 22
"""Rows and logits up to which the head is part of the graph, which then holds memory for them: 80
MiB at most for all sizes together. A larger head takes the device longer than its launch takes the
host."""

ROW, TOKEN, POSITION, SLOT, TARGET, LENGTH, ADAPTER, STATE_IN, STATE_OUT = range(9)
_PADDING = np.array([[0], [0], [0], [-1], [0], [0], [-1], [-1], [-1]], np.int64)
"""A column of inputs for each row of a step, and the column of a padding row: row; flat index of
its token in the pool; position for rotary embedding; slot for its KV (-1 for none); flat index of
its next token (of padding: :attr:`InputBatch.scratch`); KV length (0 attends to nothing); slot of
its adapter (-1 for none); slots of its recurrent states before the step (-1 for fresh ones) and
after it (-1 for none)."""


def graph_sizes(max_batch_size: int, requested: Sequence[int] | None = None) -> list[int]:
    """Numbers of rows to capture, ascending; batches in between are padded to the next.

    Args:
        max_batch_size: rows of the persistent batch.
        requested: sizes; empty for no graphs. Default: 1, 2, 4, 8, then every 8th to 256 and
            every 16th to 512, so that at most a tenth of the rows is padding beyond 80.
    """
    if requested is None:
        limit = min(max_batch_size, LARGEST)
        steps = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]
        return [*(size for size in steps if size < limit), limit]
    sizes = sorted(set(requested))
    enough = bisect_left(sizes, max_batch_size) + 1
    return sizes[:enough]


class DecodeGraphs(GraphSet[tuple[int, bool]]):
    """The graphs of one model: :meth:`measure`, :meth:`capture`, then :meth:`run` per step.

    Implements :class:`tgi_cli.worker.executors.Executor`. A key is a number of rows, and whether
    with adapters.

    Args:
        model: computes hidden states and logits.
        attention: holds the KV cache.
        rows: the persistent batch.
        vocab_size: width of the logits that the choice reads.
        sizes: from :func:`graph_sizes`, at least one.
        make: makes graphs that share their memory; called again whenever all are captured again.
        lora: of the model; None if it has no slots for adapters. Steps with adapters have graphs
            of their own, so that other steps need not pay for them.
        greedy: chooses the likeliest token of each row of logits, and launches the same for any
            numbers; None to leave the choice to the sampler. Where the head is in the graph, a
            second graph follows it that makes this choice and puts the tokens into the pool.
        own_logits: computes what ``greedy`` takes from hidden states, where the model's shards have
            parts of it: the head is then in the second graph. Default: the model's logits.

    Attributes:
        captured: graph and output by key.
        choices: the graphs of the choice, and their outputs (:class:`ForwardOutput`'s ``choose``).
    """

    def __init__(
        self,
        model: RunnableModel,
        attention: PagedAttention,
        rows: InputBatch,
        vocab_size: int,
        sizes: Sequence[int],
        make: Callable[[], Callable[[], Graph]] = cuda_graphs,
        lora: LoraCache | None = None,
        greedy: Callable[[Tensor], Sampled] | None = None,
        own_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(attention.device, make)
        self.sizes = list(sizes)
        self.largest = self.sizes[-1]
        self._model = model
        self._attention = attention
        self._rows = rows
        self._lora = lora
        self._greedy = greedy
        self._own_logits = own_logits
        self._head_rows = min(MAX_HEAD_ROWS, MAX_HEAD_LOGITS // vocab_size)
        self._pin = attention.device.type == "cuda"
        self._padding = _PADDING.copy()
        self._padding[TARGET] = rows.scratch
        self._inputs = torch.empty(
            len(_PADDING) * self.largest, dtype=torch.int64, device=attention.device
        )
        self._buffers: AttentionMetadata | None = None
        self._hidden: Tensor | None = None
        self._chosen: Tensor | None = None
        """int32 [rows, 2]; see :func:`packed_choice`."""
        self._states = attention.states
        self._state_slots: dict[int, StateMetadata] = {}
        """By size. Graphs read their tensors."""
        self.choices: dict[tuple[int, bool], tuple[Graph, Tensor]] = {}

    def resize(self, sizes: Sequence[int]) -> None:
        """Capture these sizes instead, none larger than before, from the next capture on."""
        if sizes[-1] > self.largest:
            raise ValueError(f"graphs of {sizes[-1]} rows where {self.largest} were the most")
        self.sizes = list(sizes)
        self.largest = self.sizes[-1]

    def drop(self) -> None:
        self.choices.clear()
        self._buffers = self._hidden = self._chosen = None
        self._state_slots.clear()
        super().drop()

    def supports(self, batch: StepBatch) -> bool:
        """Whether it is of decodes alone, and of no more than there are graphs for."""
        return (
            batch.only_decodes
            and len(batch.rows) <= self.largest
            and not batch.reports_prompts
            and not batch.step.snapshots
        )

    def run(self, batch: StepBatch) -> ForwardOutput:
        """See :meth:`tgi_cli.worker.executors.Executor.run`."""
        rows, ends, slots, table = batch.rows, batch.ends(), batch.adapter_slots, self._rows
        count = len(rows)
        size = self.sizes[bisect_left(self.sizes, count)]
        key = size, slots is not None
        graph, output = self.captured[key]
        staged = torch.empty((len(_PADDING), size), dtype=torch.int64, pin_memory=self._pin)
        columns = staged.numpy()
        columns[:, count:] = self._padding
        values = columns[:, :count]
        values[ROW] = rows
        values[LENGTH] = ends
        position = np.subtract(ends, 1, out=values[POSITION])
        target = np.multiply(rows, table.width, out=values[TARGET])
        target += ends
        np.subtract(target, 1, out=values[TOKEN])
        block, offset = np.divmod(position, table.block_size)
        np.multiply(table.host_blocks[rows, block], table.block_size, out=values[SLOT])
        values[SLOT] += offset
        if table.image_positions.shifted:
            position += table.image_positions.shifts[rows]
        values[ADAPTER] = -1 if slots is None else slots
        if self._states is not None:
            values[STATE_IN] = batch.step.state_in
            values[STATE_OUT] = batch.step.state_out
        inputs = self._view(size)
        inputs.copy_(staged, non_blocking=True)
        if slots is not None and self._lora is not None:
            self._lora.plan(slots, inputs[ADAPTER])
        self._attention.plan_replay(size, ends)
        graph.replay()
        chosen = table.sampling.select(rows, ends)
        choose = None
        if not chosen.flags and key in self.choices:  # all of them greedy, and no more than that
            choose = partial(self._choose, key, count)
        return ForwardOutput(
            output[:count],
            chosen,
            inputs[TARGET, :count],
            is_logits=self._has_logits(size),
            choose=choose,
        )

    def _choose(self, key: tuple[int, bool], count: int) -> Tensor:
        graph, chosen = self.choices[key]
        graph.replay()
        return chosen[:count]

    def keys(self) -> list[tuple[int, bool]]:
        kinds = (True, False) if self._lora is not None else (False,)
        return [(size, adapted) for size in reversed(self.sizes) for adapted in kinds]

    def _view(self, size: int) -> Tensor:
        """int64 [9, size]: the beginning of the same memory, whatever the size."""
        return self._inputs[: len(_PADDING) * size].view(-1, size)

    def prepare(self) -> None:
        width = self._rows.blocks.shape[1]
        self._buffers = self._attention.decode_buffers(self.largest, width)
        if self._buffers is None:
            raise RuntimeError(f"{type(self._attention).__name__} has no steps of a fixed size")
        self._chosen = choice_buffer(min(self.largest, self._head_rows), self._device)

    def plan(self, key: tuple[int, bool]) -> None:
        size, adapted = key
        inputs = self._view(size)
        inputs.copy_(torch.from_numpy(self._padding).expand(-1, size))
        if self._lora is not None:
            slots = np.array([0 if adapted else -1], np.int32)
            self._lora.plan(slots, inputs[ADAPTER] if adapted else None)
        self._attention.plan_padded(None, size)
        if self._states is not None:
            if size not in self._state_slots:
                slots_of = StateMetadata.of_decodes(inputs[STATE_IN], inputs[STATE_OUT])
                self._state_slots[size] = slots_of
            self._states.plan(self._state_slots[size])

    def compute(self, key: tuple[int, bool]) -> Tensor:
        size, _ = key
        hidden = self._forward(size)
        if self._hidden is None:  # the first, and largest one, before any is captured
            self._hidden = torch.empty_like(hidden)
        if self._has_logits(size):
            return self._model.logits(hidden)
        return self._hidden[:size].copy_(hidden)

    def _has_logits(self, size: int) -> bool:
        """Whether the first graph of a size ends with the head."""
        return self._own_logits is None and size <= self._head_rows

    def run_once(self, key: tuple[int, bool]) -> None:
        output = self.compute(key)
        if self._greedy is not None and key[0] <= self._head_rows:
            self._pack(key[0], output)

    def record(self, key: tuple[int, bool], make: Callable[[], Graph]) -> None:
        super().record(key, make)
        if self._greedy is not None and key[0] <= self._head_rows:
            output, graph = self.captured[key][1], make()
            self.choices[key] = graph, graph.capture(lambda: self._pack(key[0], output))

    def _pack(self, size: int, output: Tensor) -> Tensor:
        """The second graph's work over the output of the first; see :func:`packed_choice`."""
        assert self._greedy is not None
        assert self._chosen is not None
        logits = output if self._own_logits is None else self._own_logits(output)
        targets = self._view(size)[TARGET]
        return packed_choice(self._greedy(logits), self._rows, targets, self._chosen[:size])

    def _forward(self, size: int) -> Tensor:
        """Hidden states [size, H] of the inputs."""
        inputs, table, buffers = self._view(size), self._rows, self._buffers
        assert buffers is not None
        # What plan_padded would copy is written in the graph itself, which saves its launch.
        buffers.kv_lens[:size].copy_(inputs[LENGTH])
        buffers.slot_mapping[:size].copy_(inputs[SLOT])
        torch.index_select(table.blocks, 0, inputs[ROW], out=buffers.block_table[:size])
        input_ids = table.gather(inputs[TOKEN])
        return self._model.forward(input_ids, inputs[POSITION], self._attention)


def choice_buffer(rows: int, device: torch.device) -> Tensor:
    """int32 [rows, 2] for :func:`packed_choice`; to be made outside of a capture.

    It is written by graphs of the choice alone. A forward pass that is replayed while the result is
    copied to the host leaves it as it is, where it may overwrite memory of the graphs' pool.
    """
    return torch.zeros(rows, 2, dtype=torch.int32, device=device)


def packed_choice(chosen: Sampled, rows: InputBatch, targets: Tensor, out: Tensor) -> Tensor:
    """Put chosen tokens into the pool at ``targets``, by operators that a graph can hold.

    Args:
        chosen: of N rows.
        rows: the persistent batch.
        targets: [N], flat indices.
        out: int32 [N, 2], part of a :func:`choice_buffer`.

    Returns:
        ``out``, with ids and the bits of their log-probabilities.
    """
    rows.record_write(targets, chosen.token_ids)
    out[:, 0].copy_(chosen.token_ids)
    out[:, 1].copy_(chosen.logprobs.view(torch.int32))
    return out
