"""A step's slots of recurrent states, in the form that layers read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import StateMetadata
from tgi_cli.engine.step import Step

Columns = list[NDArray[np.int64]]


def state_columns(step: Step) -> Columns:
    """The slots of a step: in, out, tokens before the snapshot, its slot; nothing without states.

    Each is int64 with a number per entry of the step.
    """
    if not step.state_out:
        return []
    count = len(step.rows)
    after, snapshots = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    for snapshot in step.snapshots:
        after[snapshot.index] = snapshot.count
        snapshots[snapshot.index] = snapshot.slot
    return [np.array(step.state_in, np.int64), np.array(step.state_out, np.int64), after, snapshots]


def state_metadata(
    step: Step, query_start_loc: Tensor, columns: Columns, tensors: Sequence[Tensor]
) -> StateMetadata | None:
    """What layers read of the columns; ``tensors`` are the same numbers on the device."""
    if not columns:
        return None
    slots_in, slots_out, snapshot_after, snapshot_slots = tensors
    return StateMetadata(
        query_start_loc=query_start_loc,
        slots_in=slots_in,
        slots_out=slots_out,
        snapshot_after=snapshot_after,
        snapshot_slots=snapshot_slots,
        query_lens_host=step.counts,
        slots_in_host=step.state_in,
        slots_out_host=step.state_out,
        snapshot_after_host=columns[2].tolist(),
        snapshot_slots_host=columns[3].tolist(),
    )
