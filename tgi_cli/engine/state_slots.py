"""Slots for the recurrent states of sequences.

A model with recurrent states (convolutions, linear attention, state space models) keeps, beside the
KV of its attention layers, a state of constant size per sequence, in a *slot* of the worker's
cache. A step reads the state of a sequence before its first token from one slot and writes that
after its last one to another, or to the same.
"""

from __future__ import annotations

from tgi_cli.engine.block_pool import BlockPool
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Step

FRESH = -1
"""In place of a slot to be read: a state of zeros."""


class StateSlots:
    """Gives slots to running sequences.

    Args:
        config: has at least as many slots as rows.

    Attributes:
        pool: the slots, of which each has a reference per owner.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        if config.num_state_slots < config.max_batch_size:
            raise ValueError(
                f"{config.num_state_slots} state slots for {config.max_batch_size} rows"
            )
        self.pool = BlockPool(config.num_state_slots)

    def attach(self, sequence: Sequence) -> None:
        """Give a sequence that gets a row a slot of its own."""
        (sequence.state_slot,) = self.pool.take(1)

    def detach(self, sequence: Sequence) -> None:
        """Take the slot from a sequence that leaves its row."""
        self.pool.release([sequence.state_slot])
        sequence.state_slot = FRESH

    def compute(self, step: Step, sequence: Sequence, start: int) -> None:
        """Add the slots of an entry that computes a sequence from position ``start`` on."""
        step.state_in.append(sequence.state_slot if start else FRESH)
        step.state_out.append(sequence.state_slot)
