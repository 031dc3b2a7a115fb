"""The watermark of Kirchenbauer et al. 2023 (A Watermark for Large Language Models).

The token before splits the vocabulary: a share gamma of it is green and gets delta added. Who
knows the hash counts green tokens in a text: a share of gamma is chance, more is the mark.

Where the paper permutes the vocabulary with a seeded generator, here each (token before, token)
is hashed to 32 bits and is green below gamma x 2**32. So no generator is run per row, the green
share is gamma in expectation, and a detector is one line:
``mix(token ^ mix(HASH_KEY * before % 2**32)) < gamma * 2**32``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tgi_cli.sampling.table import WATERMARK, SamplingBatch
from tgi_cli.sampling.upload import Upload

HASH_KEY = 15485863
"""TGI's: the millionth prime."""

MAX_HASHED = 1 << 20
"""Hashes computed at once: bounds the temporary memory (16 bytes each)."""

_LOWEST = -(1 << 31)


def mark(scores: Tensor, batch: SamplingBatch, pool: Tensor, upload: Upload) -> None:
    """Add watermark_delta to the green tokens of the entries that ask, in place.

    Args:
        scores: float32 [N, V].
        batch: the N entries.
        pool: int32 [rows, width], the tokens known so far of every row.
        upload: brings host arrays to the device.
    """
    entries = batch.where(WATERMARK)
    records = batch.records[entries]
    before = batch.rows[entries] * pool.shape[1] + batch.positions[entries] - 1
    # Hashes are int32, whose products wrap; moved by 2**31 they compare as if unsigned.
    limits = (records["watermark_gamma"] * 2.0**32).astype(np.int64) + _LOWEST
    deltas = np.ascontiguousarray(records["watermark_delta"])
    target, place, limit, delta = upload(entries, before, limits.astype(np.int32), deltas)
    seed = mix(pool.view(-1)[place] * HASH_KEY)
    vocabulary = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    size = max(1, MAX_HASHED // scores.shape[1])
    for first in range(0, len(entries), size):
        part = slice(first, first + size)
        hashed = mix(vocabulary ^ seed[part].unsqueeze(1)).bitwise_xor_(_LOWEST)
        green = hashed < limit[part].unsqueeze(1)
        scores.index_add_(0, target[part], green * delta[part].unsqueeze(1))


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, int32 with the bits of unsigned ones; overwrites ``x``.

    Two rounds of multiply and shift, with constants found by search (Wellons, hash-prospector).
    The shifts of int32 drag the sign along, which is masked away.
    """
    x ^= x >> 16 & 0xFFFF
    x *= 0x21F0AAAD
    x ^= x >> 15 & 0x1FFFF
    x *= 0x735A2D97
    x ^= x >> 15 & 0x1FFFF
    return x
