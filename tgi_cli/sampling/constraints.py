"""Biases, allowed tokens, bad words, premature stop ids, and grammar masks.

The lists are on the host, so that a step uploads only the cells that it changes. Bad words are
matched on the device, which has the tokens, so that nothing waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.sampling.filters import ROW_BY_ROW
from tgi_cli.sampling.table import ALLOWED, BAD_WORDS, BIASED, MIN_TOKENS, SamplingBatch
from tgi_cli.sampling.upload import Upload

_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0.0),
    np.float32(-math.inf),
)
"""float32 [256, 8]: what each value of a mask's byte adds to eight scores."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that some entries of a batch may choose.

    Attributes:
        entries: int64 [M], ascending and distinct.
        bits: int32 [M, ceil(V / 32)]: bit i of word w is set if token 32 w + i is allowed (the
            layout of xgrammar and llguidance).
    """

    entries: NDArray[np.int64]
    bits: NDArray[np.int32]

    def between(self, first: int, end: int) -> TokenMasks | None:
        """The masks of entries ``first .. end``, renumbered from ``first``, or None if none."""
        low, high = np.searchsorted(self.entries, (first, end)).tolist()
        if low == high:
            return None
        return TokenMasks(self.entries[low:high] - first, self.bits[low:high])


def add_bias(scores: Tensor, batch: SamplingBatch, upload: Upload) -> None:
    """Add each entry's logit_bias to ``scores`` (float32 [N, V]), in place."""
    cells, values = [], []
    for entry in batch.where(BIASED).tolist():
        lists = batch.lists_of(entry)
        known = lists.bias_ids < scores.shape[1]
        cells.append(lists.bias_ids[known] + entry * scores.shape[1])
        values.append(lists.bias_values[known])
    cell, value = upload(np.concatenate(cells), np.concatenate(values))
    scores.view(-1).index_add_(0, cell, value)


def forbid(scores: Tensor, batch: SamplingBatch, pool: Tensor, upload: Upload) -> None:
    """Set the scores of tokens that are not allowed, bad words and premature stop ids to -inf.

    Args:
        scores: float32 [N, V], changed in place.
        batch: the N entries.
        pool: int32 [rows, width], the known tokens of every row.
        upload: brings host arrays to the device.
    """
    vocab_size = scores.shape[1]
    if batch.flags & ALLOWED:
        _allow(scores, batch, upload)
    if not batch.flags & (BAD_WORDS | MIN_TOKENS):
        return
    cells = []
    for entry in batch.where(BAD_WORDS | MIN_TOKENS).tolist():
        lists = batch.lists_of(entry)
        flags = int(batch.records["flags"][entry])
        for flag, ids in ((BAD_WORDS, lists.banned), (MIN_TOKENS, lists.stops)):
            if flags & flag:
                cells.append(ids[ids < vocab_size] + entry * vocab_size)
    flat = np.concatenate(cells)
    if len(flat):
        (cell,) = upload(flat)
        scores.view(-1).index_fill_(0, cell, -math.inf)
    if batch.flags & BAD_WORDS:
        _forbid_last_tokens(scores, batch, pool, upload)


def _allow(scores: Tensor, batch: SamplingBatch, upload: Upload) -> None:
    """Set the scores of all other tokens to -inf where an entry lists allowed ones."""
    entries, cells = batch.where(ALLOWED), []
    for entry in entries.tolist():
        ids = batch.lists_of(entry).allowed
        cells.append(ids[ids < scores.shape[1]] + entry * scores.shape[1])
    row, cell = upload(entries, np.concatenate(cells))
    flat = scores.view(-1)
    allowed = flat[cell]
    scores.index_fill_(0, row, -math.inf)
    flat[cell] = allowed


def _forbid_last_tokens(scores: Tensor, batch: SamplingBatch, pool: Tensor, upload: Upload) -> None:
    """Set the score of the last token of each bad word to -inf if the others end the sequence."""
    cells, positions, tokens, lengths = [], [], [], []
    for entry in batch.where(BAD_WORDS).tolist():
        lists, length = batch.lists_of(entry), int(batch.positions[entry])
        possible = (lists.lasts < scores.shape[1]) & (lists.lengths <= length)
        if not possible.any():
            continue
        matched = np.repeat(possible, lists.lengths)
        start = int(batch.rows[entry]) * pool.shape[1] + length
        cells.append(lists.lasts[possible] + entry * scores.shape[1])
        positions.append(start - lists.back[matched])
        tokens.append(lists.prefix[matched])
        lengths.append(lists.lengths[possible])
    if not cells:
        return
    sizes = np.concatenate(lengths)
    word = np.repeat(np.arange(len(sizes)), sizes)
    cell, position, token, owner = upload(
        np.concatenate(cells), np.concatenate(positions), np.concatenate(tokens), word
    )
    differs = (pool.view(-1)[position] != token).float()
    misses = torch.zeros(len(sizes), device=scores.device).index_add_(0, owner, differs)
    # Added, not written: several words may end in the same token.
    scores.view(-1).index_add_(0, cell, torch.where(misses == 0, -math.inf, 0.0))


def apply_masks(scores: Tensor, masks: TokenMasks, upload: Upload) -> None:
    """Set the scores of tokens that a mask does not allow to -inf, in place."""
    vocab_size = scores.shape[1]
    if scores.device.type in ROW_BY_ROW:
        rows = scores.numpy()
        mask_bytes = np.ascontiguousarray(masks.bits, np.dtype("<i4")).view(np.uint8)
        for entry, row in zip(masks.entries.tolist(), mask_bytes, strict=True):
            rows[entry] += _ADDED.take(row, axis=0).reshape(-1)[:vocab_size]
        return
    entries, bits = upload(masks.entries, masks.bits)
    allowed = bits.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bits.device) & 1
    zero = allowed.flatten(1)[:, :vocab_size] == 0
    scores[entries] = scores[entries].masked_fill_(zero, -math.inf)
