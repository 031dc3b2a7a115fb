"""Biases of scores that a model computes from its tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tools.paged_run import make_metadata
from tgi_cli.attention import KVSpec, PagedAttention, create_attention
from tgi_cli.models.hf import biases
from tgi_cli.models.hf.biases import DistanceBias, KeyBias

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, VALUE, EXTENT, SCALE = 4, 2, 16, 8, 12, 0.3
LENGTHS = (35, 9)


def prepared(window: int | None, backend: str) -> PagedAttention:
    spec = KVSpec(KV_HEADS, DIM, window, value_dim=VALUE, gathered=True)
    attention = create_attention(backend, [spec], 8, torch.float32, CPU)
    attention.allocate(16)
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))
    return attention


def expected(
    states: tuple[Tensor, Tensor, Tensor], bias: Tensor, sinks: Tensor | None, window: int | None
) -> Tensor:
    query, key, value = (x.transpose(0, 1).double() for x in states)
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (key, value))
    length = query.shape[1]
    distances = torch.arange(length)[:, None] - torch.arange(length)
    scores = query @ key.transpose(1, 2) * SCALE
    for q in range(length):
        for k in range(q + 1):
            if q - k < EXTENT:
                scores[:, q, k] += bias[:, q, q - k]
    scores[:, (distances < 0) | (distances >= (window or length))] = float("-inf")
    if sinks is None:
        return (scores.softmax(-1) @ value).transpose(0, 1).float()
    rows = torch.cat((scores, sinks[..., None].double()), -1).softmax(-1)
    return (rows[..., :-1] @ value).transpose(0, 1).float()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_queries_have_profiles_of_biases_by_distance(
    backend: str, window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(biases, "TILE_SCORES", HEADS * 24 * 5)  # a few queries at once
    torch.manual_seed(0)
    attention = prepared(window, backend)
    texts = [
        tuple(torch.randn(n, heads, size) for heads, size in
              ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE)))
        for n in LENGTHS
    ]  # fmt: skip
    profiles = [torch.randn(HEADS, n, EXTENT) for n in LENGTHS]
    sinks = [torch.randn(HEADS, n) if has_sinks else None for n in LENGTHS]
    tables, done = [[3, 9, 1, 7, 5], [2, 8]], [0, 0]
    got: list[list[Tensor]] = [[], []]
    for counts in ((20, 8), (1, 1), (14, 0)):
        rows = [row for row in range(2) if counts[row]]
        lens = [counts[row] for row in rows]
        ends = [done[row] + counts[row] for row in rows]
        order = [(row, slice(done[row], done[row] + counts[row])) for row in rows]
        attention.plan(make_metadata([tables[row] for row in rows], lens, ends, 8))
        query, key, value = (
            torch.cat([texts[row][part][tokens] for row, tokens in order]) for part in range(3)
        )
        bias = torch.cat([profiles[row][:, tokens] for row, tokens in order], 1)
        sink = [sinks[row] for row, _ in order]
        output = biases.attend(
            attention,
            0,
            (query, key, value),
            SCALE,
            DistanceBias(bias[None]),
            torch.cat([s[:, tokens] for s, (_, tokens) in zip(sink, order, strict=True)], 1)
            if has_sinks
            else None,
        )
        for (row, _), part in zip(order, output.split(lens), strict=True):
            got[row].append(part)
            done[row] += len(part)
    for row, states in enumerate(texts):
        wanted = expected(states, profiles[row], sinks[row], window)
        torch.testing.assert_close(torch.cat(got[row]), wanted, atol=1e-5, rtol=1e-5)


def test_a_bias_of_keys_becomes_a_dimension() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, HEADS, 7, DIM), torch.randn(1, KV_HEADS, 7, DIM)
    bias = KeyBias(torch.randn(1, KV_HEADS, 7), None)
    wide, keys = bias.folded(query, key, SCALE)
    assert wide.shape[-1] == keys.shape[-1] == DIM + 16
    share = HEADS // KV_HEADS
    scores = wide @ keys.repeat_interleave(share, 1).transpose(2, 3) * SCALE
    plain = query @ key.repeat_interleave(share, 1).transpose(2, 3) * SCALE
    wanted = plain + bias.values.repeat_interleave(share, 1)[:, :, None]
    torch.testing.assert_close(scores, wanted)


def test_a_backend_of_tiles_has_nothing_to_gather() -> None:
    spec = KVSpec(KV_HEADS, 16, gathered=True)
    attention = create_attention(None, [spec], 16, torch.bfloat16, CPU)
    attention.allocate(2)
    attention.plan(make_metadata([[1]], [1], [1], 16))
    key = torch.randn(1, KV_HEADS, 16).bfloat16()
    attention.write(0, key, key, torch.tensor([16]))
    assert torch.equal(attention.gather(attention.key_cache[0], 0), key.float().transpose(0, 1))


def test_a_step_of_a_fixed_size_has_nothing_to_gather() -> None:
    attention = prepared(None, "cpu")
    with pytest.raises(ValueError, match="fixed size"):
        attention.gather(attention.key_cache[0], 0)
