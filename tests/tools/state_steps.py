"""Steps over a cache of states, for tests of the layers that keep one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_cli.attention import StateCache, StateMetadata, StateSpec, StateTensor

CPU = torch.device("cpu")
SLOTS = 40


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence's part of a step: its tokens, and the slots that it reads and writes."""

    length: int
    slot_in: int
    slot_out: int
    snapshot_after: int = 0
    snapshot_slot: int = -1


def make_states(*tensors: StateTensor, device: torch.device = CPU) -> StateCache:
    """One layer's cache, full of NaN: nothing that was not written may be read."""
    cache = StateCache([StateSpec(tensors)], device)
    cache.allocate(SLOTS)
    for tensor in cache.tensors[0].values():
        tensor.fill_(float("nan"))
    return cache


def state_metadata(pieces: Sequence[Piece], device: torch.device = CPU) -> StateMetadata:
    """The slots of a step of these pieces, in their order."""
    return StateMetadata.of(
        [piece.length for piece in pieces],
        [piece.slot_in for piece in pieces],
        [piece.slot_out for piece in pieces],
        device,
        {
            index: (piece.snapshot_after, piece.snapshot_slot)
            for index, piece in enumerate(pieces)
            if piece.snapshot_slot >= 0
        },
    )


Run = Callable[[Tensor], Tensor]
"""The outputs of rows of the input, which are given by their indices."""


def run_whole(states: StateCache, lengths: Sequence[int], run: Run) -> Tensor:
    """Texts one after the other, each in a step of its own: outputs [all tokens, ...]."""
    outputs, start = [], 0
    for slot, length in enumerate(lengths):
        states.plan(state_metadata([Piece(length, -1, slot)], states.device))
        outputs.append(run(torch.arange(start, start + length)))
        start += length
    return torch.cat(outputs)


def run_mixed(
    states: StateCache, lengths: Sequence[int], run: Run, seed: int = 0, *, exact: bool = True
) -> Tensor:
    """As :func:`run_whole`, of texts in pieces that share steps.

    Every step may write to another slot than it reads, and leave a snapshot in its middle, from
    which the text then goes on as often as not: what came after it is computed again, and is the
    same to the bit if ``run`` is ``exact`` (products of few rows and of many may not be).
    """
    choose = random.Random(seed)
    free = set(range(SLOTS))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    done, slots = [0] * len(lengths), [-1] * len(lengths)
    outputs: dict[int, Tensor] = {}
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        pieces, rows, changes = [], [], []
        for i, length in enumerate(lengths):
            left = length - done[i]
            if not left or choose.random() < 0.3:
                continue
            size = min(left, choose.choice((1, 1, 2, 3, 7, 20)))
            stays = slots[i] >= 0 and choose.random() < 0.5
            out = slots[i] if stays else free.pop()
            after, snapshot = 0, -1
            if choose.random() < 0.5:
                after, snapshot = choose.randint(1, size), free.pop()
            pieces.append(Piece(size, slots[i], out, after, snapshot))
            rows += range(starts[i] + done[i], starts[i] + done[i] + size)
            goes_back = snapshot >= 0 and choose.random() < 0.5
            kept = snapshot if goes_back else out
            changes.append((i, after if goes_back else size, kept))
            free |= {slots[i], out, snapshot} - {kept, -1}
        if not pieces:
            continue
        states.plan(state_metadata(pieces, states.device))
        for row, output in zip(rows, run(torch.tensor(rows)), strict=True):
            if row in outputs:
                limit = 0.0 if exact else 1e-4
                torch.testing.assert_close(output, outputs[row], atol=limit, rtol=limit)
            outputs[row] = output
        for i, size, kept in changes:
            done[i], slots[i] = done[i] + size, kept
        for slot in free:
            for tensor in states.tensors[0].values():
                tensor[slot].fill_(float("nan"))
    return torch.stack([outputs[row] for row in sorted(outputs)])
