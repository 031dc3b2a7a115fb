"""Slots for the recurrent states of sequences, and snapshots of them for reuse.

A model with recurrent states (convolutions, linear attention, state space models) keeps, beside the
KV of its attention layers, a state of constant size per sequence, in a *slot* of the worker's
cache. A step reads a sequence's state before its first token from one slot and writes the state
after its last token to another slot or to the same. So a prefix hit or a fork reads a shared slot
and writes its own, and a state is kept by not writing to its slot: nothing is copied.

A state cannot be cut back to fewer tokens as KV can. A prefix is reused only where a *snapshot*
ends: a slot whose content is known, by the same hashes as KV blocks (:mod:`.kv_cache`). There are
few, as a state is as large as the KV of thousands of tokens:

1. at the last block boundary before the last token of a prompt;
2. a *rolling* one per sequence, at the last boundary that it has passed: it replaces the previous
   one, and remains when the sequence ends or is preempted;
3. where cached KV reaches further than any snapshot: at the second use of a system prompt.

Slots that rows may need are never used for snapshots.
"""

from __future__ import annotations

from tgi_cli.engine.block_pool import BlockPool
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.sequence import Sequence, StateSnapshot
from tgi_cli.engine.step import FRESH, Snapshot, Step


class StateSlots:
    """Gives slots to running sequences, and makes snapshots in those that are spare.

    Args:
        config: has at least as many slots as rows.

    Attributes:
        pool: the slots. One has a reference from each sequence that is to read or write it, and
            from each step in flight that makes a snapshot in it. Those without are available, and
            keep their content until they are taken.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        rows, slots = config.max_batch_size, config.num_state_slots
        if slots < rows:
            raise ValueError(f"{slots} state slots are too few for {rows} rows")
        self.pool = BlockPool(slots)
        self._rows = rows
        self._block_size = config.block_size
        self._reuse = config.prefix_caching
        self._owners = 0
        self._rolling = 0
        self._max_rolling = (slots - rows) // 2
        self._read: list[int] = []
        """Slots that sequences have released and that the step being scheduled reads."""

    @property
    def _spare(self) -> int:
        """Available slots beyond one for each row that has none yet; never negative."""
        return self.pool.num_available - (self._rows - self._owners)

    # ------------------------------------------------------------------ rows

    def hold(self, sequence: Sequence, source: int) -> None:
        """Have a waiting sequence start from the state in ``source``, or from a fresh one."""
        if source == FRESH:
            return
        if self._spare or self.pool.is_used(source):
            self.pool.share([source])
        else:  # the sequence overwrites the snapshot
            self.pool.share([source])
            self.pool.forget(source)
            self._owners += 1
            sequence.state_slot = source
        sequence.state_source = source

    def attach(self, sequence: Sequence) -> None:
        """Give a sequence that gets a row a slot of its own."""
        if sequence.state_slot == FRESH:
            self._owners += 1
            (sequence.state_slot,) = self.pool.take(1)

    def detach(self, sequence: Sequence) -> None:
        """Take all slots from a sequence that leaves its row or does not get one."""
        source, slot = sequence.state_source, sequence.state_slot
        if source not in (FRESH, slot):
            self.pool.release([source])
        if slot != FRESH:
            self.pool.release([slot])
            self._owners -= 1
        self.release_prompt(sequence)
        self._rolling -= sequence.rolls
        sequence.state_source = sequence.state_slot = FRESH
        sequence.rolls, sequence.rolling = False, None

    def release_prompt(self, sequence: Sequence) -> None:
        """Release the state that forks of a sequence start from, as none waits any more."""
        if sequence.prompt_state != FRESH:
            self.pool.release([sequence.prompt_state])
            sequence.prompt_state = FRESH

    # ------------------------------------------------------------------ steps

    def compute(self, step: Step, sequence: Sequence, start: int, end: int) -> StateSnapshot | None:
        """Add the slots of an entry that computes positions ``start`` to ``end``.

        Returns the snapshot that it makes, if any, for :meth:`keep` or :meth:`drop`.
        """
        source, slot = sequence.state_source, sequence.state_slot
        step.state_in.append(source)
        step.state_out.append(slot)
        if source not in (FRESH, slot):
            self._read.append(source)  # until the step is complete: no entry of it may write there
        sequence.state_source = slot
        position = self._boundary(sequence, start, end) if self._spare else 0
        if not position:
            return None
        if self.pool.evicts and not self._is_lasting(sequence, position):
            self._forget_rolling(sequence)  # rather than that of another sequence
        (taken,) = self.pool.take(1)
        if position == end:
            # The state stays where this entry leaves it, and the next one writes elsewhere.
            kept, sequence.state_slot = slot, taken
            self.pool.share([kept])
        else:
            kept = taken
            step.snapshots.append(Snapshot(len(step.state_out) - 1, position - start, kept))
        if position == self._prompt_boundary(sequence) and sequence.num_forks:
            self.pool.share([kept])
            sequence.prompt_state = kept
        return StateSnapshot(position, kept)

    def commit(self) -> None:
        """Complete the step being scheduled."""
        if self._read:
            self.pool.release(self._read)
            self._read = []

    def keep(self, sequence: Sequence, snapshot: StateSnapshot) -> None:
        """Index a snapshot of a running sequence that a step has made."""
        if self._reuse:
            content = sequence.block_hashes[snapshot.position // self._block_size - 1]
            self.pool.index(snapshot.slot, content)
            if not self._is_lasting(sequence, snapshot.position):
                self._forget_rolling(sequence)
                sequence.rolling = snapshot.slot, content
        self.drop(snapshot)

    def _forget_rolling(self, sequence: Sequence) -> None:
        """Release the rolling snapshot, which another one replaces."""
        if sequence.rolling is not None:
            slot, content = sequence.rolling
            if self.pool.find(content) == slot:
                self.pool.forget(slot)
            sequence.rolling = None

    def drop(self, snapshot: StateSnapshot) -> None:
        """Release a snapshot whose step failed or whose sequence has ended."""
        self.pool.release([snapshot.slot])

    def find(self, content: bytes) -> int:
        """The slot with the state after the block of this hash, or FRESH."""
        slot = self.pool.find(content)
        return FRESH if slot is None else slot

    def _boundary(self, sequence: Sequence, start: int, end: int) -> int:
        """Where between ``start`` and ``end`` to make a snapshot, if anywhere; else 0."""
        prompt = self._prompt_boundary(sequence)
        if start < prompt <= end:
            return prompt if self._reuse or sequence.num_forks else 0
        last = end // self._block_size * self._block_size
        if not self._reuse or last <= start:
            return 0
        if end == sequence.snapshot_at:
            return end
        if not sequence.rolls and self._rolling < self._max_rolling:
            sequence.rolls = True
            self._rolling += 1
        return last if sequence.rolls else 0

    def _is_lasting(self, sequence: Sequence, position: int) -> bool:
        """Whether a snapshot there is not a rolling one."""
        return position in (self._prompt_boundary(sequence), sequence.snapshot_at)

    def _prompt_boundary(self, sequence: Sequence) -> int:
        """The last block boundary before the last token of the prompt."""
        return (sequence.prompt_tokens - 1) // self._block_size * self._block_size
