"""Sequences that keep what they were given until they end, beside those of a scheduler.

A held sequence takes a row and all the blocks that it may ever need, as
text-generation-inference's paged models do (backends/v3/src/block_allocator.rs): nothing can be
lacking later, when it is too late to refuse it. Where there is no room, the scheduler's newest
are preempted, unless they were promised to stay.

What is left alone must not stand in the way for ever: after :data:`IDLE_SECONDS` it may be *parked*
when others need the room. It loses its row and its blocks, and its next step computes again what
it had, which nobody can see in the output.
"""

from __future__ import annotations

import time
from dataclasses import replace

from tgi_cli.engine.config import CapacityPolicy
from tgi_cli.engine.messages import AdvanceError, AdvanceFault, Finished, FinishReason
from tgi_cli.engine.optional_outputs import extras_of
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.sequence import Sequence, Status
from tgi_cli.engine.step import GrammarCompiler, NewRow, Step

IDLE_SECONDS = 2.0
"""A caller who drives a batch comes back within milliseconds; one who is gone never does."""


class ReservedSequences(Scheduler):
    """A scheduler that gives held sequences their places.

    Args:
        host: schedules what nobody holds; its rows, blocks and adapters are shared.
        grammars: compiles them; None: no request may have one.
    """

    def __init__(self, host: Scheduler, grammars: GrammarCompiler | None = None) -> None:
        limits = replace(host.limits, max_queued_requests=None, max_queued_tokens=None)
        super().__init__(limits, grammars=grammars, beside=host)
        self._host = host
        self._promised = limits.capacity_policy is CapacityPolicy.GUARANTEED_NO_EVICT
        self._used: dict[int, float] = {}
        """When each was last asked for, in ``time.monotonic()``; infinity: it is right now."""

    @property
    def num_driven(self) -> int:
        """Sequences whose caller seems to be there; may be read from any thread."""
        latest = time.monotonic() - IDLE_SECONDS
        return sum(used > latest for used in list(self._used.values()))

    def give_way(self) -> None:
        """Others wait: park what was left alone."""
        while self._park_idle():
            pass

    def _place(self, step: Step, absent: list[Sequence]) -> None:
        """Give each its row and all the blocks that it may ever need, or nobody anything."""
        found = [self.cache.match(sequence) for sequence in absent]
        for blocks in found:
            self.pool.share(blocks)
        lacking = [
            self.cache.blocks_for(sequence.max_tokens - 1) - len(blocks)
            for sequence, blocks in zip(absent, found, strict=True)
        ]
        adapters = {sequence.request.adapter_id for sequence in absent} - {0}
        shared = {block for blocks in found for block in blocks}
        if absent and not self._make_room(len(absent), sum(lacking), adapters, shared):
            for blocks in found:
                self.pool.release(blocks)
            culprit, cause = self._shortage(absent, lacking)
            raise AdvanceError(AdvanceFault.NO_ROOM, cause, culprit)
        for sequence, blocks in zip(absent, found, strict=True):
            sequence.block_ids = blocks
            sequence.num_computed = len(blocks) * self.limits.block_size
            self.cache.grow(sequence, sequence.max_tokens - 1)
            self.waiting.admit(sequence)
            self._take_row(step, sequence)

    def _take_row(self, step: Step, sequence: Sequence) -> None:
        request = sequence.request
        sequence.row = self._admission.free_rows.pop()
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        if not sequence.started:
            sequence.started = True
            self._admission.reused_tokens += sequence.num_computed
            self._admission.prompt_tokens += sequence.prompt_tokens
        step.new.append(
            NewRow(
                row=sequence.row,
                request_id=request.request_id,
                token_ids=list(sequence.token_ids),
                prompt_tokens=sequence.prompt_tokens,
                block_ids=list(sequence.block_ids),
                sampling=request.sampling,
                extras=extras_of(request),
                adapter_slot=self.adapters.enter(request.adapter_id, step),
            )
        )

    def _make_room(self, rows: int, blocks: int, adapters: set[int], shared: set[int]) -> bool:
        """Whether so much is free beside ``shared`` blocks, after parking and preempting."""
        if self._fits(rows, blocks, adapters):
            return True
        if not self._could_fit(rows, blocks, shared):
            return False
        while not self._fits(rows, blocks, adapters):
            if not self._park_idle() and not self._preempt_host():
                return False
        return True

    def _fits(self, rows: int, blocks: int, adapters: set[int]) -> bool:
        running = self._host.running if self._promised else ()
        claims = sum(self.cache.demand(other) - len(other.block_ids) for other in running)
        return (
            rows <= len(self._admission.free_rows)
            and blocks + claims <= self.pool.num_available
            and self.adapters.have_slots(adapters)
        )

    def _could_fit(self, rows: int, blocks: int, shared: set[int]) -> bool:
        """Whether it would if nobody else ran: otherwise nobody is made to wait in vain."""
        busy = [sequence for sequence in self.running if not self._is_idle(sequence)]
        theirs = {block for s in busy for block in s.block_ids[s.num_window_freed :]} | shared
        free_rows = self.limits.max_batch_size - len(busy)
        return rows <= free_rows and blocks <= self.pool.num_blocks - len(theirs)

    def _shortage(self, absent: list[Sequence], lacking: list[int]) -> tuple[int, str]:
        """Which one is the first that finds no room, and of what."""
        rows, blocks = len(self._admission.free_rows), self.pool.num_available
        size = self.limits.block_size
        for place, sequence in enumerate(absent):
            request_id = sequence.request.request_id
            if place >= rows:
                taken = f"all {self.limits.max_batch_size} places of the batch are taken"
                return request_id, taken
            if lacking[place] > blocks:
                return request_id, (
                    f"it needs {sequence.max_tokens - 1} tokens of the KV cache, and of its "
                    f"{self.pool.num_blocks * size} no more than {blocks * size} can be had"
                )
            blocks -= lacking[place]
        if self.adapters.have_slots({sequence.request.adapter_id for sequence in absent} - {0}):
            return absent[-1].request.request_id, "what is free was promised to others that run"
        return absent[-1].request.request_id, "all slots for adapters are in use"

    def _preempt_host(self) -> bool:
        """Make the scheduler's last in rank wait again; none of its steps is in flight."""
        if self._promised or not self._host.running:
            return False
        self._host._preempt(self._host.running[-1])
        return True

    def _is_idle(self, sequence: Sequence) -> bool:
        used = self._used.get(sequence.request.request_id, 0.0)
        return time.monotonic() - used >= IDLE_SECONDS

    def _park_idle(self) -> bool:
        """Park one that was left alone; false: there is none."""
        for sequence in self.running:
            if self._is_idle(sequence):
                self._preempt(sequence)
                return True
        return False

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> Finished:
        self._used.pop(sequence.request.request_id, None)
        return super()._finish(sequence, reason, error)
