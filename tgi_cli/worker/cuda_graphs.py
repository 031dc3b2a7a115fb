"""CUDA graphs of decode steps: recorded once per padded number of rows, then repeated.

A decode step is some hundred kernels that take microseconds each: if the host launches them one
by one, it is slower than the device. A graph launches them at once, always on the same memory
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). So a step is here:

======================  ==============================================================
on the host             one column of numbers per row, in a pinned buffer; padding columns
one copy                the buffer to :class:`_Inputs`, where graphs read it
in the graph            token ids from the pool, block tables from the rows', the model, which
                        reads and writes slots of states, the head (where its logits are few)
after it                the sampler, over the rows without padding
======================  ==============================================================

No value that varies is a constant in a graph. The copies and the graphs run in order on one
stream, so a step may be prepared while the one before it runs. The same order ensures that a
graph's result is used before the next graph overwrites it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention, StateMetadata
from tgi_cli.device import available_memory
from tgi_cli.worker.executors import ForwardOutput, RunnableModel
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.sizing.memory import release_unused_memory
from tgi_cli.worker.step_inputs import StepBatch

log = logging.getLogger(__name__)

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
its token in the pool; position; slot for its KV (-1 for none); flat index of its next token; KV
length (0 attends to nothing); slot of its adapter (-1 for none); slots of its recurrent states
before the step (-1 for fresh ones) and after it (-1 for none)."""


class Graph(Protocol):
    """Work on a device, recorded once and repeated on the same memory."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record what ``work`` launches and return its tensor, which every replay fills anew."""
        ...

    def replay(self) -> None:
        """Launch the recorded work on the current stream; does not wait."""
        ...


class CudaGraph:
    """Implements :class:`Graph`; those that share a ``pool`` must not run at the same time."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        # Other threads (NCCL's watchdog, the reader of adapters) may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, self._pool, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs() -> Callable[[], Graph]:
    """Create a factory of graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


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


class DecodeGraphs:
    """The graphs of one model: :meth:`measure`, :meth:`capture`, then :meth:`run` per step.

    Implements :class:`tgi_cli.worker.executors.Executor`.

    Args:
        model: computes hidden states and logits.
        attention: holds the KV cache.
        rows: the persistent batch.
        vocab_size: width of the logits.
        sizes: from :func:`graph_sizes`, at least one.
        make: makes graphs that share their memory; called anew whenever all are captured anew.
        lora: of the model; None if it has no slots for adapters. Steps with adapters have graphs
            of their own, so that other steps need not pay for them.

    Attributes:
        captured: graph and output by size and whether with adapters.
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
    ) -> None:
        self.sizes = list(sizes)
        self.largest = self.sizes[-1]
        self._model = model
        self._attention = attention
        self._rows = rows
        self._lora = lora
        self._make = make
        self._head_rows = min(MAX_HEAD_ROWS, MAX_HEAD_LOGITS // vocab_size)
        self._pin = attention.device.type == "cuda"
        self._inputs = torch.empty(
            len(_PADDING) * self.largest, dtype=torch.int64, device=attention.device
        )
        self._buffers: AttentionMetadata | None = None
        self._hidden: Tensor | None = None
        self._states = attention.states
        self._state_slots: dict[int, StateMetadata] = {}
        """By size. Graphs read their tensors."""
        self.captured: dict[tuple[int, bool], tuple[Graph, Tensor]] = {}

    @torch.inference_mode()
    def measure(self) -> int:
        """Bytes that all graphs will take, estimated from two of them, which are dropped.

        To be called with the cache that is there for warm-up. Raises what a capture raises.
        """
        device, free = self._attention.device, []
        keys = list(self._keys())
        self._prepare(keys[:2])
        release_unused_memory(device)
        free.append(available_memory(device))
        make = self._make()
        for key in keys[:2]:
            self._record(key, make)
            free.append(available_memory(device))
        self.drop()
        later = max(0, free[1] - free[2]) if len(free) > 2 else 0
        return max(0, free[0] - free[1]) + later * (len(keys) - 1)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all graphs, over the cache as it is now allocated.

        Raises:
            Exception: an operation of the model, its kernels or the device cannot be captured.
        """
        keys = list(self._keys())
        self._prepare(keys)
        make = self._make()
        for key in keys:
            self._record(key, make)

    def drop(self) -> None:
        """Free the memory of all graphs."""
        self.captured.clear()
        self._buffers = self._hidden = None
        self._state_slots.clear()
        release_unused_memory(self._attention.device)

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
        graph, output = self.captured[size, slots is not None]
        staged = torch.empty((len(_PADDING), size), dtype=torch.int64, pin_memory=self._pin)
        columns = staged.numpy()
        columns[:, count:] = _PADDING
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
        return ForwardOutput(
            output[:count],
            table.sampling.select(rows, ends),
            inputs[TARGET, :count],
            is_logits=size <= self._head_rows,
        )

    def _keys(self) -> Iterator[tuple[int, bool]]:
        """Sizes, and whether with adapters: largest first, so that others reuse their memory."""
        for size in reversed(self.sizes):
            for adapted in (True, False) if self._lora is not None else (False,):
                yield size, adapted

    def _view(self, size: int) -> Tensor:
        """int64 [9, size]: the beginning of the same memory, whatever the size."""
        return self._inputs[: len(_PADDING) * size].view(-1, size)

    def _prepare(self, keys: Sequence[tuple[int, bool]]) -> None:
        """Run each step once: libraries and compilers do at first use what a graph cannot hold."""
        width = self._rows.blocks.shape[1]
        self._buffers = self._attention.decode_buffers(self.largest, width)
        if self._buffers is None:
            raise RuntimeError(f"{type(self._attention).__name__} has no steps of a fixed size")
        for size, adapted in keys:
            self._plan(size, adapted)
            hidden = self._forward(size)
            if self._hidden is None:  # the largest size
                self._hidden = torch.empty_like(hidden)
            if size <= self._head_rows:
                self._model.logits(hidden)

    def _plan(self, size: int, adapted: bool) -> None:
        """Do what precedes a step and is no part of its graph, for a step of padding."""
        inputs = self._view(size)
        inputs.copy_(torch.from_numpy(_PADDING).expand(-1, size))
        if self._lora is not None:
            slots = np.array([0 if adapted else -1], np.int32)
            self._lora.plan(slots, inputs[ADAPTER] if adapted else None)
        self._attention.plan_padded(None, size)
        if self._states is not None:
            if size not in self._state_slots:
                slots_of = StateMetadata.of_decodes(inputs[STATE_IN], inputs[STATE_OUT])
                self._state_slots[size] = slots_of
            self._states.plan(self._state_slots[size])

    def _record(self, key: tuple[int, bool], make: Callable[[], Graph]) -> None:
        size, adapted = key
        self._plan(size, adapted)
        assert self._hidden is not None
        shared, graph = self._hidden[:size], make()

        def work() -> Tensor:
            hidden = self._forward(size)
            return self._model.logits(hidden) if size <= self._head_rows else shared.copy_(hidden)

        self.captured[key] = graph, graph.capture(work)

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
