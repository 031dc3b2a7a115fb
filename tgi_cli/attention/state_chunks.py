"""A step's prompts as calls of kernels that carry states over many tokens at once.

Such kernels take sequences with their states before them and return those after them. They know
neither slots nor snapshots: a prompt that leaves a snapshot on its way is computed in two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIN_TOKENS = 64
"""Tokens from which on a sequence is computed in chunks; the kernels' chunks are as long."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence of a step; the slots are those of :class:`tgi_cli.attention.StateMetadata`."""

    length: int
    slot_in: int
    slot_out: int
    snapshot_after: int
    snapshot_slot: int


@dataclass(frozen=True, slots=True)
class ChunkCall:
    """N sequences that are computed together.

    Attributes:
        tokens: their tokens in the flat batch: a slice, or indices, int64 [T] on the device.
        starts: int64 [N+1], where each sequence begins among these tokens, on the device.
        starts_host: the same on the host.
        slots_in: int64 [N], read before a sequence's first token; -1 for a fresh state of zeros.
        kept: int64 [M], the sequences whose states after their last tokens are stored.
        slots: int64 [M], where.
    """

    tokens: slice | Tensor
    starts: Tensor
    starts_host: Tensor
    slots_in: Tensor
    kept: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class StepChunks:
    """A step of sequences of few tokens, decodes above all, and after these of prompts.

    Attributes:
        few: how many sequences lead that are better computed token by token.
        few_tokens: their tokens.
        calls: that compute the others, one after the other.
    """

    few: int
    few_tokens: int
    calls: tuple[ChunkCall, ...]

    @classmethod
    def of(cls, entries: Sequence[Entry], device: torch.device) -> StepChunks | None:
        """None if no sequence has :data:`MIN_TOKENS` tokens."""
        long = (index for index, entry in enumerate(entries) if entry.length >= MIN_TOKENS)
        few = next(long, None)
        if few is None:
            return None
        start = few_tokens = sum(entry.length for entry in entries[:few])
        first, second = [], []
        for entry in entries[few:]:
            length, after = entry.length, entry.snapshot_after
            if entry.snapshot_slot < 0 or after == length:
                targets = (entry.slot_out, entry.snapshot_slot)
                first.append(_Piece(start, length, entry.slot_in, targets))
            else:
                kept = entry.snapshot_slot
                first.append(_Piece(start, after, entry.slot_in, (kept,)))
                second.append(_Piece(start + after, length - after, kept, (entry.slot_out,)))
            start += length
        calls = [_call(pieces, device) for pieces in (first, second) if pieces]
        return cls(few, few_tokens, tuple(calls))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of a sequence, with the slots that are read before and written after them."""

    start: int
    length: int
    source: int
    targets: tuple[int, ...]


def _call(pieces: list[_Piece], device: torch.device) -> ChunkCall:
    def on_device(numbers: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.int64).to(device)

    begin, end = pieces[0].start, pieces[-1].start + pieces[-1].length
    lengths = [piece.length for piece in pieces]
    tokens: slice | Tensor = slice(begin, end)
    if sum(lengths) < end - begin:
        spans = [np.arange(piece.start, piece.start + piece.length) for piece in pieces]
        tokens = on_device(np.concatenate(spans))
    stored = [
        (index, slot) for index, piece in enumerate(pieces) for slot in piece.targets if slot >= 0
    ]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return ChunkCall(
        tokens,
        starts.to(device),
        starts,
        on_device([piece.source for piece in pieces]),
        on_device([index for index, _ in stored]),
        on_device([slot for _, slot in stored]),
    )
