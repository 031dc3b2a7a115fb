"""Rows and blocks for sequences that keep them until they end, beside those of a scheduler.

A reserved sequence takes a row and all the blocks that it may ever need, as
text-generation-inference's paged models do (backends/v3/src/block_allocator.rs), so that it cannot
fail later, when it is too late to refuse it. If too little is free, the scheduler's newest
sequences are preempted, unless they are guaranteed to stay.

An abandoned sequence must not block others forever: after :data:`IDLE_SECONDS` it may be *parked*.
It loses its row and its blocks, and its next step recomputes them, which does not change the
output.
"""

from __future__ import annotations

import time

from tgi_cli.engine.batch import Batch
from tgi_cli.engine.config import CapacityPolicy
from tgi_cli.engine.messages import AdvanceError, AdvanceFault
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Step

IDLE_SECONDS = 2.0
"""Time without a step after which a sequence is idle: a live caller returns within milliseconds."""


class ReservedSequences:
    """Gives the sequences of a batch rows and blocks until they end.

    Args:
        batch: the reserved sequences.
        scheduled: the sequences of the scheduler on the same worker; none of its steps may be in
            flight when :meth:`allocate` is called.
    """

    def __init__(self, batch: Batch, scheduled: Batch) -> None:
        self._batch = batch
        self._scheduled = scheduled
        self._config = batch.config
        self._promised = self._config.capacity_policy is CapacityPolicy.GUARANTEED_NO_EVICT

    @property
    def num_active(self) -> int:
        """Sequences that are not idle; may be read from any thread."""
        return sum(not _is_idle(sequence) for sequence in list(self._batch.live.values()))

    def allocate(self, step: Step, absent: list[Sequence]) -> None:
        """Give each a row in ``step`` and all the blocks that it may ever need.

        Raises:
            AdvanceError: they do not fit together; nothing has changed for them.
        """
        batch = self._batch
        for sequence in absent:
            batch.cache.hold(sequence)
        lacking = [
            batch.cache.blocks_for(sequence.max_tokens - 1) - len(sequence.block_ids)
            for sequence in absent
        ]
        adapters = {sequence.request.adapter_id for sequence in absent} - {0}
        shared = {block for sequence in absent for block in sequence.block_ids}
        if absent and not self._free_up(len(absent), sum(lacking), adapters, shared):
            for sequence in absent:
                batch.cache.release(sequence)
                sequence.num_computed = 0
            raise self._shortage(absent, lacking, adapters)
        for sequence in absent:
            batch.cache.grow(sequence, sequence.max_tokens - 1)
            batch.run(sequence, step)

    def park_idle(self) -> bool:
        """Park one idle sequence; False if there is none."""
        for sequence in self._batch.running:
            if _is_idle(sequence):
                self._batch.preempt(sequence)
                return True
        return False

    def _free_up(self, rows: int, blocks: int, adapters: set[int], shared: set[int]) -> bool:
        """Park and preempt until this much is free beside ``shared`` blocks.

        Returns False, without parking or preempting any, if that is impossible.
        """
        if self._fits(rows, blocks, adapters):
            return True
        busy = [sequence for sequence in self._batch.running if not _is_idle(sequence)]
        taken = {block for s in busy for block in s.block_ids[s.num_window_freed :]} | shared
        if rows + len(busy) > self._config.max_batch_size:
            return False
        if blocks + len(taken) > self._config.num_blocks:
            return False
        while not self._fits(rows, blocks, adapters):
            if self.park_idle():
                continue
            if self._promised or not self._scheduled.running:
                return False
            self._scheduled.preempt(self._scheduled.running[-1])
        return True

    def _fits(self, rows: int, blocks: int, adapters: set[int]) -> bool:
        batch = self._batch
        promised = batch.cache.promised(self._scheduled.running) if self._promised else 0
        return (
            rows <= len(batch.resources.free_rows)
            and blocks + promised <= batch.pool.num_available
            and batch.adapters.have_slots(adapters)
        )

    def _shortage(
        self, absent: list[Sequence], lacking: list[int], adapters: set[int]
    ) -> AdvanceError:
        """The error that names what is lacking, and for which sequence first."""
        rows, blocks = len(self._batch.resources.free_rows), self._batch.pool.num_available
        size = self._config.block_size
        culprit, cause = absent[-1], "free blocks are promised to other running requests"
        if not self._batch.adapters.have_slots(adapters):
            cause = "all slots for adapters are in use"
        for index, sequence in enumerate(absent):
            if index >= rows:
                culprit = sequence
                cause = f"all {self._config.max_batch_size} rows of the batch are in use"
                break
            if lacking[index] > blocks:
                culprit = sequence
                cause = (
                    f"it needs {sequence.max_tokens - 1} tokens of the KV cache, and of its "
                    f"{self._config.num_blocks * size} only {blocks * size} are available"
                )
                break
            blocks -= lacking[index]
        return AdvanceError(AdvanceFault.NO_CAPACITY, cause, culprit.request.request_id)


def _is_idle(sequence: Sequence) -> bool:
    return time.monotonic() - sequence.last_advanced >= IDLE_SECONDS
