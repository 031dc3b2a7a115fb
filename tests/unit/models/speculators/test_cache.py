from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.tools.paged_run import CPU
from tgi_cli.attention import KVSpec
from tgi_cli.models.speculators.cache import CacheShape, DraftCache

HEADS, KV_HEADS, DIM = 4, 2, 16
BACKENDS = ["torch", "cpu"]


def make(backend: str, first: int, num_drafts: int = 3, block_size: int = 4) -> DraftCache:
    shape = CacheShape(block_size, num_drafts, 100, first)
    cache = DraftCache([KVSpec(KV_HEADS, DIM)], shape, torch.float32, CPU, backend)
    cache.allocate(16, 3)
    for each in (*cache.attention.key_cache, *cache.attention.value_cache):
        each.fill_(float("nan"))  # what a broken request may have left
    return cache


def random(count: int, heads: int, seed: int) -> Tensor:
    return torch.randn(count, heads, DIM, generator=torch.Generator().manual_seed(seed))


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last queries, [n, heads, DIM], over all keys."""
    hidden = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    share = HEADS // KV_HEADS
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), hidden
    )
    return attended.transpose(0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", [0, 1])
def test_sequences_see_their_own_tokens_from_the_first_on(backend: str, first: int) -> None:
    """Passes over two rows; behind the target's blocks they go on in scratch blocks."""
    cache = make(backend, first)
    tables = np.full((3, 30), 999, np.int32)
    tables[2, :2], tables[0, :1] = (7, 3), (11,)
    rows, lengths = np.array([2, 0]), np.array([7, 4])
    query, key, value = (
        [random(12, heads, seed + row) for row in range(2)]
        for heads, seed in ((HEADS, 0), (KV_HEADS, 10), (KV_HEADS, 20))
    )
    cache.begin(rows, lengths, tables)
    starts, counts = np.array([first, first]), lengths - first
    for _ in range(5):  # the prompts, and four tokens each
        with torch.inference_mode():
            positions = cache.plan(starts, counts)
            ends = starts + counts
            parts = list(zip(starts, ends, strict=True))
            assert positions.tolist() == [p for start, end in parts for p in range(start, end)]
            found = cache.attention(
                0,
                *(
                    torch.cat([each[i][start:end] for i, (start, end) in enumerate(parts)])
                    for each in (query, key, value)
                ),
                scale=DIM**-0.5,
            )
        expected = [
            plain(query[i][start:end], key[i][first:end], value[i][first:end])
            for i, (start, end) in enumerate(parts)
        ]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
        starts, counts = ends, np.ones_like(ends)


def test_sizes() -> None:
    shape = CacheShape(block_size=16, num_drafts=3, max_positions=100)
    assert (shape.scratch, shape.lead, shape.width) == (1, 0, 8)
    pairs = CacheShape(block_size=4, num_drafts=6, max_positions=100, first=1)
    assert (pairs.scratch, pairs.lead, pairs.width) == (2, 108, 27)
    cache = make("torch", 1)
    assert cache.block_bytes == 4 * 2 * KV_HEADS * DIM * 4
    assert cache.attention.num_blocks == 16 + 3


def test_pairs_of_layers_with_a_window_are_refused() -> None:
    shape = CacheShape(4, 3, 100, first=1)
    with pytest.raises(ValueError, match="neither windows nor chunks"):
        DraftCache([KVSpec(2, 16, 32)], shape, torch.float32, CPU)
