"""Steps with prompts by graphs: the same tokens, and nothing else touched, as without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.worker.fake_graphs import PaddedAttention, RecordedGraph, greedy
from tests.unit.worker.fakes import new_row, run, step_of
from tests.unit.worker.test_cuda_graphs import BLOCK, GREEDY, LONGEST, ROWS, VOCAB, make_runner
from tgi_cli.engine.step import BlockAppend, OptionalOutputs, Step, TokenAppend
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker.mixed_graphs import MixedGraphs, MixedSize, mixed_sizes
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.step_inputs import StepBatch

SIZES = [MixedSize(decodes, tokens) for decodes in (2, 6) for tokens in (4, 16)]


def make_mixed(
    used: bool = True, choice: Callable[[torch.Tensor], Sampled] | None = None
) -> tuple[ModelRunner, PaddedAttention]:
    runner, attention, model = make_runner(None)
    if used:
        graphs = MixedGraphs(
            model,
            attention,
            runner.rows,
            SIZES,
            lambda: RecordedGraph,
            vocab_size=VOCAB,
            greedy=choice,
        )
        graphs.capture()
        runner.mixed_graphs = graphs
        for cache in (*attention.key_cache, *attention.value_cache):
            assert not cache.any(), "a capture is of padding, which writes nothing"
    return runner, attention


def replays(runner: ModelRunner) -> dict[MixedSize, int]:
    assert runner.mixed_graphs is not None
    found: dict[MixedSize, Any] = {
        size: graph for size, (graph, _) in runner.mixed_graphs.captured.items()
    }
    return {size: graph.replays for size, graph in found.items() if graph.replays}


def chosen(runner: ModelRunner) -> int:
    """How many steps graphs have chosen the tokens of."""
    assert runner.mixed_graphs is not None
    found: list[Any] = [graph for graph, _ in runner.mixed_graphs.choices.values()]
    return sum(graph.replays for graph in found)


class Workload:
    """Sequences whose prompts come in chunks, while others decode, some of them with drafts."""

    def __init__(self, seed: int, sampled: bool = True) -> None:
        self.random = random.Random(seed)
        self.sampled = sampled
        self.blocks = self.random.sample(range(ROWS * LONGEST // BLOCK), k=120)
        self.free = list(range(ROWS))
        self.random.shuffle(self.free)
        self.prompts: dict[int, tuple[int, int]] = {}
        """Rows in prefill: tokens done, and in all."""
        self.places: dict[int, int] = {}
        """Rows that decode: the next position."""
        self.held: dict[int, int] = {}

    def step(self, most_decodes: int, most_tokens: int, draft: bool) -> Step:
        step, choose = Step(0), self.random
        decodes = choose.sample(sorted(self.places), k=min(len(self.places), most_decodes))
        decodes = [row for row in decodes if self.places[row] < LONGEST - 6]
        drafting = decodes[-1:] if draft else []
        for row in decodes:
            if row not in drafting:
                self.add(step, row, self.places[row], 1, 1)
        step.num_decodes = len(decodes)
        left = choose.randint(1, most_tokens)
        for row in drafting:
            count = choose.randint(1, 3)
            ids = [choose.randrange(VOCAB) for _ in range(count)]
            step.drafts.append(TokenAppend(row, self.places[row] + 1, ids))
            self.add(step, row, self.places[row], 1 + count, 1 + count)
            left = max(1, left - 1 - count)
        for row in decodes:
            self.places[row] += 1
        while left and (self.prompts or self.free):
            if not self.prompts:
                row, length = self.free.pop(), choose.randint(1, 20)
                tokens = [choose.randrange(VOCAB) for _ in range(length)]
                sampling = GREEDY
                if self.sampled and not row % 2:
                    sampling = SamplingParams(temperature=0.7, seed=row)
                step.new.append(new_row(row, tokens, [], sampling))
                self.held[row] = 0
                self.prompts[row] = 0, length
            row, (done, length) = self.prompts.popitem()
            count = min(left, length - done)
            self.add(step, row, done, count, int(done + count == length))
            left -= count
            if done + count == length:
                self.places[row] = length
            else:
                self.prompts[row] = done + count, length
                break
        return step

    def add(self, step: Step, row: int, start: int, count: int, samples: int) -> None:
        wanted = -(-(start + count) // BLOCK)
        if wanted > self.held[row]:
            more = [self.blocks.pop() for _ in range(wanted - self.held[row])]
            step.appended.append(BlockAppend(row, self.held[row], more))
            self.held[row] = wanted
        step.rows.append(row)
        step.starts.append(start)
        step.counts.append(count)
        step.samples.append(samples)


@pytest.mark.parametrize(("seed", "sampled"), [(0, True), (1, True), (2, False), (3, False)])
def test_replayed_steps_generate_what_eager_steps_do(seed: int, sampled: bool) -> None:
    """Chunks, prompts that end, decodes and drafts in changing numbers, rows and blocks.

    Graphs choose the tokens if all sequences are greedy, up to 10 or 14 of them.
    """
    results: list[list[Any]] = []
    caches = []
    for used in (False, True):
        runner, attention = make_mixed(used, greedy)
        workload = Workload(seed, sampled)
        results.append([])
        for number in range(24):
            step = workload.step(number % 8, 3 + 5 * (number % 5), draft=number % 3 == 0)
            if step.rows:
                results[-1].append(run(runner, step))
        caches.append([*attention.key_cache, *attention.value_cache])
    assert len(replays(runner)) >= 3
    assert 8 < sum(replays(runner).values()) < 24, "others are too large, or decodes alone"
    assert 0 < chosen(runner) <= sum(replays(runner).values())
    assert sampled or chosen(runner) > 6
    for launched, replayed in zip(*results, strict=True):
        assert replayed.token_ids == launched.token_ids
        assert replayed.logprobs == pytest.approx(launched.logprobs, abs=1e-5)
    for launched, replayed in zip(*caches, strict=True):
        torch.testing.assert_close(replayed, launched)
        written = launched.abs().sum((-1, -2)) > 0
        assert torch.equal(replayed.abs().sum((-1, -2)) > 0, written)


def batch_of(*entries: tuple[int, int, int, bool], **changes: Any) -> StepBatch:
    step = step_of(*entries)
    return StepBatch(step, np.array(step.rows, np.int64), **changes)


def test_what_no_graph_fits_is_launched() -> None:
    graphs = make_mixed()[0].mixed_graphs
    assert graphs is not None
    decodes = [(row, 5, 1, True) for row in range(7)]
    prompt = (8, 0, 10, True)
    assert graphs.supports(batch_of(prompt))
    assert graphs.supports(batch_of(*decodes[:6], prompt))
    assert not graphs.supports(batch_of(*decodes, prompt)), "seven decodes"
    assert not graphs.supports(batch_of(*decodes[:2])), "no prompt"
    assert not graphs.supports(batch_of((8, 0, 17, True))), "seventeen tokens"
    short = [(row, 0, 1, False) for row in range(9)]
    assert graphs.supports(batch_of(*short[:8]))
    assert not graphs.supports(batch_of(*short)), "nine sequences"
    assert not graphs.supports(batch_of(prompt, reports_prompts=True))
    assert not graphs.supports(batch_of(prompt, adapter_slots=np.array([0], np.int32)))
    with_states = batch_of(prompt)
    with_states.step.state_out = [0]
    assert not graphs.supports(with_states)


def test_reports_on_prompts_come_from_launched_steps() -> None:
    runner, _ = make_mixed()
    asks = replace(new_row(3, [1, 2, 5], [0]), extras=OptionalOutputs(return_context_logits=True))
    result = run(runner, step_of((3, 0, 3, True), new=[asks]))
    assert result.context_logits[0].shape == (3, VOCAB)
    assert replays(runner) == {}


def test_a_chunk_that_samples_nothing_writes_its_cache_alone() -> None:
    runner, attention = make_mixed()
    new = [new_row(2, list(range(1, 9)), [5, 6])]
    before = runner.rows.tokens.clone()
    result = run(runner, step_of((2, 0, 4, False), new=new))
    assert result.token_ids == []
    assert replays(runner) == {MixedSize(2, 4): 1}
    changed = (runner.rows.tokens != before).nonzero().tolist()
    assert [place for place in changed if place[0] != 2] == []
    written = (attention.key_cache[0].abs().sum((-1, -2)) > 0).nonzero().tolist()
    assert written == [[5, offset] for offset in range(BLOCK)]


def test_tokens_that_no_graph_looks_up_are_chosen_by_the_sampler() -> None:
    """A graph of 2 decodes and 4 tokens looks up 6 of them, one of 16 tokens 8 beside decodes."""
    results = []
    for used in (False, True):
        runner, _ = make_mixed(used, greedy)
        new = [new_row(row, [row, row + 1], [row, row + 20]) for row in range(8)]
        entries = [(row, 0, 2, True) for row in range(8)]
        results.append([run(runner, step_of(*entries, new=new)).token_ids])
        assert not used or chosen(runner) == 1
        drafts = [TokenAppend(row, 3, [4, 5, 6, 7]) for row in range(3)]
        step = step_of(*((row, 2, 5, False) for row in range(3)))
        step.samples, step.drafts, step.num_decodes = [5] * 3, drafts, 3
        results[-1].append(run(runner, step).token_ids)
    assert replays(runner) == {MixedSize(2, 16): 2}
    assert chosen(runner) == 1, "of 15 tokens, no graph looks up more than 10"
    assert results[0] == results[1]


def test_few_logits_alone_are_computed_by_graphs() -> None:
    runner, attention, model = make_runner(None)
    sizes = [MixedSize(decodes, 16) for decodes in (8, 32, 56, 57)]
    for vocab_size, decodes in ((VOCAB, {8, 32, 56}), (151_936, {8, 32}), (262_144, {8})):
        graphs = MixedGraphs(
            model, attention, runner.rows, sizes, vocab_size=vocab_size, greedy=greedy
        )
        assert {size.decodes for size in sizes if graphs.chooses(size)} == decodes


@pytest.mark.parametrize(
    ("rows", "tokens", "decodes", "prompts"),
    [
        (1, 16, {1}, {16}),
        (8, 32, {8}, {32}),
        (100, 300, {8, 32, 100}, {32, 64, 128, 256, 300}),
        (4000, 8192, {8, 32, 128, 256}, {32, 64, 128, 256, 512}),
    ],
)
def test_sizes_are_those_that_steps_can_have(
    rows: int, tokens: int, decodes: set[int], prompts: set[int]
) -> None:
    sizes = mixed_sizes(rows, tokens)
    assert len(set(sizes)) == len(sizes) == len(decodes) * len(prompts)
    assert {size.decodes for size in sizes} == decodes
    assert {size.tokens for size in sizes} == prompts
    assert all(size.sequences >= 8 for size in sizes)
