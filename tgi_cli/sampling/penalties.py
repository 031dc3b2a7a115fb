"""Repetition, frequency and presence penalties, computed from the token pool at each step.

The pool already holds every row's tokens on the device, so the penalties need no counts of their
own: no memory per row and vocabulary entry, and nothing to restore when a sequence is preempted,
resumed or moved to another row. A step takes time proportional to the lengths of the penalized
sequences, as its attention does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.sampling.table import COUNTED, PENALIZED, RELATIVE, SamplingBatch
from tgi_cli.sampling.upload import Upload

MAX_TOKENS_AT_ONCE = 1 << 19
"""Tokens processed at once; bounds the temporary memory (about 64 bytes each)."""

_LARGEST = torch.finfo(torch.float32).max


def penalize(scores: Tensor, batch: SamplingBatch, pool: Tensor, upload: Upload) -> None:
    """Apply the penalties of ``batch`` to ``scores`` in place.

    For each token that the sequence holds: divide a positive and multiply a negative score by
    the repetition penalty (Keskar et al. 2019, CTRL); then, if the output holds it, subtract
    frequency_penalty x its count and presence_penalty (OpenAI's API reference); then subtract
    relative_frequency_penalty x its share of the sequence (TGI's frequency_penalty).

    Args:
        scores: float32 [N, V].
        batch: the N entries.
        pool: int32 [rows, width], the tokens of row r at positions 0, 1, ...
        upload: brings host arrays to the device.
    """
    for entries in _groups(batch.where(PENALIZED), batch.positions):
        _penalize_group(scores, batch[entries], entries, pool, upload)


def _groups(entries: NDArray[np.int64], lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Split entries into groups of at most ``MAX_TOKENS_AT_ONCE`` tokens, or of one entry."""
    start = total = 0
    for index, length in enumerate(lengths[entries].tolist()):
        if total + length > MAX_TOKENS_AT_ONCE and index > start:
            yield entries[start:index]
            start, total = index, 0
        total += length
    if start < len(entries):
        yield entries[start:]


def _penalize_group(
    scores: Tensor,
    batch: SamplingBatch,
    entries: NDArray[np.int64],
    pool: Tensor,
    upload: Upload,
) -> None:
    count, vocab_size = len(batch), scores.shape[1]
    begins = batch.column("context_start")
    total = int((batch.positions - begins).sum())
    lengths, first, rows, targets, prompts, repetition, frequency, presence, relative = upload(
        batch.positions - begins,
        begins,
        batch.rows,
        entries,
        batch.column("prompt_tokens"),
        batch.column("repetition_penalty"),
        batch.column("frequency_penalty"),
        batch.column("presence_penalty"),
        batch.column("relative_frequency_penalty"),
    )
    device = scores.device
    # Ragged, not padded: one entry per token of each sequence. With output_size given,
    # repeat_interleave does not wait for the device.
    owner = torch.repeat_interleave(torch.arange(count, device=device), lengths, output_size=total)
    starts = lengths.cumsum(0) - lengths
    offset = torch.arange(total, device=device) + (first - starts)[owner]
    token = pool.view(-1)[rows[owner] * pool.shape[1] + offset].long()

    flat = scores.view(-1)
    cell = targets[owner] * vocab_size + token
    score = flat[cell]
    masked = score == -math.inf
    penalty = repetition[owner]
    score = torch.where(score < 0, score * penalty, score / penalty)
    count_cell = owner * vocab_size + token

    def occurrences(counted: Tensor) -> Tensor:
        counts = torch.zeros(count * vocab_size, dtype=torch.float32, device=device)
        return counts.index_add_(0, count_cell, counted)[count_cell]

    if batch.flags & COUNTED:
        times = occurrences((offset >= prompts[owner]).float())
        score -= frequency[owner] * times + presence[owner] * (times > 0)
    if batch.flags & RELATIVE:
        share = occurrences(torch.ones(total, device=device)) / lengths[owner]
        score -= relative[owner] * share
    # Infinity would mean masked, or make NaN: clamp what overflows.
    score.clamp_(-_LARGEST, _LARGEST).masked_fill_(masked, -math.inf)
    # A token that occurs twice writes the same value twice: the order does not matter.
    flat[cell] = score
