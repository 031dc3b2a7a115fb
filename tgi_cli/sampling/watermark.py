"""The watermark of Kirchenbauer et al. 2023 (A Watermark for Large Language Models).

The previous token splits the vocabulary: a share gamma of it is green and gets delta added. A
detector that knows the hash counts green tokens in a text: a share of gamma is chance, more is the
watermark.

The paper permutes the vocabulary with a seeded generator; here each pair (previous token, token) is
hashed to 32 bits and is green below gamma x 2**32. So no generator runs per row, the expected green
share is gamma, and a detector is one line:
``mix(token ^ mix(HASH_KEY * previous % 2**32)) < gamma * 2**32``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tgi_cli.sampling.table import WATERMARK, SamplingBatch
from tgi_cli.sampling.upload import Upload

HASH_KEY = 15485863
"""TGI's hash key, the millionth prime."""

MAX_HASHED = 1 << 20
"""Hashes computed at once; bounds the temporary memory (16 bytes each)."""

_LOWEST = -(1 << 31)


def mark(scores: Tensor, batch: SamplingBatch, pool: Tensor, upload: Upload) -> None:
    """Add watermark_delta to the green tokens of entries with a watermark, in place.

    Args:
        scores: float32 [N, V].
        batch: the N entries.
        pool: int32 [rows, width], the known tokens of every row.
        upload: brings host arrays to the device.
    """
    entries = batch.where(WATERMARK)
    records = batch.records[entries]
    previous = batch.rows[entries] * pool.shape[1] + batch.positions[entries] - 1
    # Hashes are int32, whose products wrap; moved by 2**31 they compare as if unsigned.
    limits = (records["watermark_gamma"] * 2.0**32).astype(np.int64) + _LOWEST
    deltas = np.ascontiguousarray(records["watermark_delta"])
    target, position, limit, delta = upload(entries, previous, limits.astype(np.int32), deltas)
    seed = mix(pool.view(-1)[position] * HASH_KEY)
    vocabulary = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    size = max(1, MAX_HASHED // scores.shape[1])
    for first in range(0, len(entries), size):
        part = slice(first, first + size)
        hashed = mix(vocabulary ^ seed[part].unsqueeze(1)).bitwise_xor_(_LOWEST)
        green = hashed < limit[part].unsqueeze(1)
        scores.index_add_(0, target[part], green * delta[part].unsqueeze(1))


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, as the bits of an int32; overwrites ``x``.

    Two rounds of multiply and shift, with constants found by search (Wellons, hash-prospector).
    Shifts of an int32 copy the sign, which is masked.
    """
    x ^= x >> 16 & 0xFFFF
    x *= 0x21F0AAAD
    x ^= x >> 15 & 0x1FFFF
    x *= 0x735A2D97
    x ^= x >> 15 & 0x1FFFF
    return x
