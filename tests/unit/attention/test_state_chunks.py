"""Prompts as calls of kernels that carry states over many tokens."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tgi_cli.attention import StateMetadata
from tgi_cli.attention.state_chunks import MIN_TOKENS

CPU = torch.device("cpu")


def test_steps_of_few_tokens_have_no_chunks() -> None:
    step = StateMetadata.of([1, MIN_TOKENS - 1], [-1, 0], [1, 0], CPU)
    assert step.chunks() is None


def test_a_prompt_is_one_call_behind_the_decodes() -> None:
    step = StateMetadata.of([1, 1, 5, 70, 3], [4, 0, -1, -1, 2], [4, 1, 2, 3, 5], CPU)
    chunks = step.chunks()
    assert chunks is not None
    assert step.chunks() is chunks, "made once for all layers"
    assert (chunks.few, chunks.few_tokens) == (3, 7)
    (call,) = chunks.calls
    assert call.tokens == slice(7, 80)
    assert call.starts.tolist() == call.starts_host.tolist() == [0, 70, 73]
    assert call.slots_in.tolist() == [-1, 2]
    assert (call.kept.tolist(), call.slots.tolist()) == ([0, 1], [3, 5])


def test_a_snapshot_on_the_way_takes_a_second_call() -> None:
    snapshots = {0: (64, 9), 1: (80, 8)}
    step = StateMetadata.of([70, 80, 66], [-1, 6, 7], [3, 4, -1], CPU, snapshots)
    chunks = step.chunks()
    assert chunks is not None
    assert chunks.few == chunks.few_tokens == 0
    first, second = chunks.calls
    assert isinstance(first.tokens, Tensor)
    assert first.tokens.tolist() == [*range(64), *range(70, 216)]
    assert first.starts.tolist() == [0, 64, 144, 210]
    assert first.slots_in.tolist() == [-1, 6, 7]
    # The second's snapshot is at its end; the third is padding, with nowhere to write.
    assert first.kept.tolist() == [0, 1, 1]
    assert first.slots.tolist() == [9, 4, 8]
    assert second.tokens == slice(64, 70)
    assert second.slots_in.tolist() == [9]
    assert (second.kept.tolist(), second.slots.tolist()) == ([0], [3])


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_computed_once_and_in_order(seed: int) -> None:
    """States are lists of the tokens so far."""
    dice = random.Random(seed)
    lens = [1] * dice.randrange(3) + [dice.randrange(1, 150) for _ in range(dice.randrange(1, 5))]
    count = len(lens)
    sources = [dice.choice((-1, index)) for index in range(count)]
    targets = [dice.choice((index, count + index)) for index in range(count)]
    snapshots = {
        index: (dice.randint(1, lens[index]), 2 * count + index)
        for index in range(count)
        if dice.random() < 0.5
    }
    step = StateMetadata.of(lens, sources, targets, CPU, snapshots)
    chunks = step.chunks()
    if chunks is None:
        assert max(lens) < MIN_TOKENS
        return
    held: dict[int, list[int]] = {index: [-index - 1] for index in range(count)}
    before = dict(held)
    flat = torch.arange(sum(lens))
    assert chunks.few_tokens == sum(lens[: chunks.few])
    assert lens[chunks.few] >= MIN_TOKENS
    for call in chunks.calls:
        tokens, starts = flat[call.tokens].tolist(), call.starts.tolist()
        last = [
            (held[source] if source >= 0 else []) + tokens[begin:end]
            for source, begin, end in zip(
                call.slots_in.tolist(), starts[:-1], starts[1:], strict=True
            )
        ]
        for index, slot in zip(call.kept.tolist(), call.slots.tolist(), strict=True):
            held[slot] = last[index]
    start = chunks.few_tokens
    for index in range(chunks.few, count):
        own = list(range(start, start + lens[index]))
        first = before[sources[index]] if sources[index] >= 0 else []
        assert held[targets[index]] == first + own
        if index in snapshots:
            after, slot = snapshots[index]
            assert held[slot] == first + own[:after]
        start += lens[index]
