"""Decode steps by graphs: the same tokens, and nothing else touched, as without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.worker.fake_graphs import PaddedAttention, RecordedGraph, TinyModel, greedy
from tests.unit.worker.fakes import CPU, new_row, run, step_of
from tgi_cli.attention import KVSpec
from tgi_cli.engine.step import BlockAppend, OptionalOutputs, Step
from tgi_cli.layers.lora import LoraTable
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker import cuda_graphs as graphs_module
from tgi_cli.worker import graph_capture
from tgi_cli.worker.cuda_graphs import DecodeGraphs, graph_sizes
from tgi_cli.worker.graph_capture import Graph
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.step_inputs import StepBatch
from tgi_cli.worker.upload import Uploader

VOCAB, ROWS, BLOCK, LONGEST = 97, 12, 4, 40
SPECS = [KVSpec(TinyModel.KV_HEADS, TinyModel.DIM)] * 2
GREEDY = SamplingParams(temperature=0.0)


def make_runner(
    sizes: list[int] | None,
    device: torch.device = CPU,
    make: Callable[[], Callable[[], Graph]] = lambda: RecordedGraph,
    choice: Callable[[torch.Tensor], Sampled] | None = None,
) -> tuple[ModelRunner, PaddedAttention, TinyModel]:
    """A runner whose block table and inputs are copied as to a device; ``sizes`` of graphs."""
    upload = Uploader(device, packed=True)
    rows = InputBatch(ROWS, LONGEST, BLOCK, upload)
    attention = PaddedAttention(SPECS, BLOCK, torch.float32, device)
    attention.allocate(ROWS * LONGEST // BLOCK + 3)
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.zero_()
    model = TinyModel(VOCAB, device=device)
    runner = ModelRunner(model, attention, rows, VOCAB)
    if sizes:
        graphs = DecodeGraphs(model, attention, rows, VOCAB, sizes, make, greedy=choice)
        graphs.capture()
        runner.graphs = graphs
        for cache in (*attention.key_cache, *attention.value_cache):
            assert not cache.any(), "a capture is of padding, which writes nothing"
    return runner, attention, model


def replays(runner: ModelRunner) -> dict[int, int]:
    assert runner.graphs is not None
    return {
        size: graph.replays  # type: ignore[attr-defined]
        for (size, _), (graph, _) in runner.graphs.captured.items()
        if graph.replays  # type: ignore[attr-defined]
    }


class Workload:
    """Random sequences of growing length in scattered rows and blocks."""

    def __init__(self, seed: int, sampling: Callable[[int], SamplingParams]) -> None:
        self.random = random.Random(seed)
        self.sampling = sampling
        self.free_blocks = self.random.sample(range(ROWS * LONGEST // BLOCK), k=120)
        self.lengths: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def prompts(self, count: int) -> Step:
        step = Step(0)
        for row in self.random.sample(range(ROWS), k=count):
            length = self.random.randint(1, 15)
            self.blocks[row] = [self.free_blocks.pop() for _ in range(-(-length // BLOCK))]
            tokens = [self.random.randrange(VOCAB) for _ in range(length)]
            step.new.append(new_row(row, tokens, self.blocks[row], self.sampling(row)))
            step.rows.append(row)
            step.starts.append(0)
            step.counts.append(length)
            step.samples.append(True)
            self.lengths[row] = length
        return step

    def decodes(self, count: int) -> Step:
        step = Step(0, num_decodes=count)
        for row in self.random.sample(sorted(self.lengths), k=count):
            position = self.lengths[row]
            if position % BLOCK == 0:
                block = self.free_blocks.pop()
                step.appended.append(BlockAppend(row, position // BLOCK, [block]))
            step.rows.append(row)
            step.starts.append(position)
            step.counts.append(1)
            step.samples.append(True)
            self.lengths[row] += 1
        return step


def everything(row: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.5 * (row % 3), seed=row, top_p=0.9, top_logprobs=row % 3, top_k=row * 5
    )


@pytest.mark.parametrize("head_in_the_graph", [True, False])
@pytest.mark.parametrize("sampling", [lambda row: GREEDY, everything])
@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps_generate_what_eager_steps_do(
    monkeypatch, seed, sampling, head_in_the_graph
):
    """Batches of changing rows, order and contexts; the caches are the same to the last slot."""
    if not head_in_the_graph:
        monkeypatch.setattr(graphs_module, "MAX_HEAD_LOGITS", 2 * VOCAB)
    results: list[list[Any]] = []
    caches = []
    for sizes in (None, [1, 2, 4, 8]):
        runner, attention, _ = make_runner(sizes)
        workload = Workload(seed, sampling)
        results.append([run(runner, workload.prompts(10))])
        for _ in range(25):
            results[-1].append(run(runner, workload.decodes(workload.random.randint(1, 10))))
        caches.append([*attention.key_cache, *attention.value_cache])
    assert runner.graphs is not None
    assert set(replays(runner)) == {1, 2, 4, 8}, "batches of 3 and 5 to 7 were padded"
    assert 0 < sum(replays(runner).values()) < 25, "batches of 9 and 10 had no graph"
    for launched, replayed in zip(*results, strict=True):
        assert replayed.token_ids == launched.token_ids
        assert replayed.logprobs == pytest.approx(launched.logprobs, abs=1e-5)
        assert replayed.top_ids == launched.top_ids
    for launched, replayed in zip(*caches, strict=True):
        torch.testing.assert_close(replayed, launched)
        written = launched.abs().sum((-1, -2)) > 0
        assert torch.equal(replayed.abs().sum((-1, -2)) > 0, written)


def test_a_step_may_be_launched_before_the_last_ones_result_is_awaited():
    expected, got = [], []
    for sizes, tokens in ((None, expected), ([4], got)):
        runner, _, _ = make_runner(sizes)
        workload = Workload(5, lambda row: GREEDY)
        pending = [runner.sample(runner.launch(workload.prompts(3)))]
        for _ in range(8):
            pending.append(runner.sample(runner.launch(workload.decodes(3))))
            tokens.append(pending.pop(0).wait().token_ids)
    assert got == expected
    assert replays(runner) == {4: 8}


def test_padding_rows_have_no_length_and_no_slot(monkeypatch):
    runner, attention, _ = make_runner([8])
    workload = Workload(1, lambda row: GREEDY)
    run(runner, workload.prompts(8))
    run(runner, workload.decodes(8))
    run(runner, workload.decodes(3))
    buffers = attention.buffers
    assert buffers is not None
    assert (buffers.kv_lens[:3] > 0).all()
    assert (buffers.slot_mapping[:3] >= 0).all()
    assert not buffers.kv_lens[3:].any(), "what the larger batch left there is gone"
    assert (buffers.slot_mapping[3:] == -1).all()


def test_only_pure_decodes_are_replayed():
    runner, _, _ = make_runner([2, 4])
    new = [new_row(row, [row + 1] * 5, [row * 3, row * 3 + 1]) for row in range(3)]
    run(runner, step_of((0, 0, 5, True), (1, 0, 3, False), new=new[:2]))
    run(runner, step_of((0, 5, 1, True), (1, 3, 2, True)))
    run(runner, step_of((0, 6, 1, True), (1, 5, 1, True), (2, 0, 5, True), new=new[2:]))
    assert replays(runner) == {}
    run(runner, step_of((2, 5, 1, True), (0, 7, 1, True)))
    assert replays(runner) == {2: 1}
    # The last token of a prompt whose logits are asked for: all hidden states are needed.
    asks = replace(new_row(5, [1, 2], [30]), extras=OptionalOutputs(return_context_logits=True))
    run(runner, step_of((5, 0, 1, False), new=[asks]))
    assert run(runner, step_of((5, 1, 1, True))).context_logits[0].shape == (1, VOCAB)
    assert replays(runner) == {2: 1}
    result = run(runner, step_of((5, 2, 1, True)))
    assert replays(runner) == {2: 2}, "its decodes ask for nothing more"
    assert not result.context_logits


def test_raw_logits_are_those_of_the_rows(monkeypatch):
    expected = None
    for sizes in (None, [4]):
        runner, _, _ = make_runner(sizes)
        asks = OptionalOutputs(return_generation_logits=True)
        new = [new_row(0, [3, 4], [0]), replace(new_row(7, [9, 8], [1]), extras=asks)]
        run(runner, step_of((0, 0, 2, True), (7, 0, 2, True), new=new))
        result = run(runner, step_of((0, 2, 1, True), (7, 2, 1, True)))
        kept = result.generation_logits[1].copy()
        run(runner, step_of((0, 3, 1, True)))
        np.testing.assert_array_equal(kept, result.generation_logits[1], "not overwritten")
        expected = kept if expected is None else expected
        np.testing.assert_allclose(kept, expected, rtol=1e-5)


def test_the_head_runs_outside_where_its_logits_are_many(monkeypatch):
    monkeypatch.setattr(graphs_module, "MAX_HEAD_LOGITS", 2 * VOCAB)
    runner, _, model = make_runner([1, 2, 4])
    workload = Workload(2, lambda row: GREEDY)
    run(runner, workload.prompts(4))
    model.head_rows.clear()
    run(runner, workload.decodes(2))
    assert model.head_rows == [], "it was replayed"
    run(runner, workload.decodes(3))
    assert model.head_rows == [3], "of the rows that are there"


@torch.inference_mode()
def test_recorded_constants_stay_constant():
    """The stand-in for a graph is as strict as a graph: this model reads a number on the host."""

    class Baking(TinyModel):
        def forward(self, input_ids, positions, attention, images=None):
            return super().forward(input_ids, positions, attention) + self.scale

    runner, attention, _ = make_runner(None)
    model = Baking(VOCAB)
    model.scale = 1.0
    graphs = DecodeGraphs(model, attention, runner.rows, VOCAB, [2], lambda: RecordedGraph)
    graphs.capture()
    batch = StepBatch(step_of((0, 0, 1, True)), np.array([0]))
    before = graphs.run(batch).output.clone()
    model.scale = 5.0
    after = graphs.run(batch).output
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("rows", "asked", "sizes"),
    [
        (1, None, [1]),
        (3, None, [1, 2, 3]),
        (20, None, [1, 2, 4, 8, 16, 20]),
        (32, None, [1, 2, 4, 8, 16, 24, 32]),
        (10, (32, 1, 2, 4, 8, 16, 16), [1, 2, 4, 8, 16]),
        (16, (1, 8, 16, 32), [1, 8, 16]),
        (100, (1, 2, 4), [1, 2, 4]),
        (100, (), []),
    ],
)
def test_sizes_are_those_that_batches_can_have(rows, asked, sizes):
    assert graph_sizes(rows, asked) == sizes


@pytest.mark.parametrize("rows", [128, 250, 256, 260, 512, 4096])
def test_little_of_a_large_batch_is_padding(rows):
    sizes = graph_sizes(rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(rows, 512)
    for count in range(80, sizes[-1] + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= 0.1 * count


def test_the_largest_is_captured_first_for_the_others_reuse_its_memory(monkeypatch):
    made: list[RecordedGraph] = []
    captured: list[int] = []

    class Counting(RecordedGraph):
        def capture(self, work):
            output = super().capture(work)
            captured.append(len(output))
            return output

    runner, attention, model = make_runner(None)
    graphs = DecodeGraphs(
        model,
        attention,
        runner.rows,
        VOCAB,
        [1, 2, 4],
        lambda: lambda: made.append(Counting()) or made[-1],
    )
    monkeypatch.setattr(graph_capture, "release_unused_memory", lambda device: None)
    assert graphs.measure() >= 0
    assert captured == [4, 2], "two tell what all will take"
    assert not graphs.captured
    graphs.capture()
    assert captured[2:] == [4, 2, 1]


class AdaptedModel(TinyModel):
    """Adapters add to what goes into the head."""

    def __init__(self, table: LoraTable) -> None:
        super().__init__(VOCAB)
        self.lora = table.layer(16, slice(0, 16), {"": (16, slice(0, 16))})

    def forward(self, input_ids, positions, attention, images=None):
        hidden = super().forward(input_ids, positions, attention)
        adapted = hidden.clone()
        self.lora.add_(adapted, hidden)
        return adapted


class FakeLoraCache:
    """What a runner asks of a LoraCache."""

    def __init__(self, table: LoraTable) -> None:
        self.table = table

    def plan(self, slots, token_slots):
        self.table.plan([] if slots is None else np.unique(slots).tolist(), token_slots)


def test_rows_with_adapters_have_graphs_of_their_own():
    """Whoever uses which changes from step to step; a batch without any does not pay for them."""
    results = []
    for sizes in (None, [1, 2, 4]):
        table = LoraTable(3, 2, 64)
        upload = Uploader(CPU, packed=True)
        rows = InputBatch(ROWS, LONGEST, BLOCK, upload)
        attention = PaddedAttention(SPECS, BLOCK, torch.float32, CPU)
        attention.allocate(60)
        model = AdaptedModel(table)
        table.allocate(torch.float32, CPU)
        table._foreign = torch.empty(64, 6, dtype=torch.bool)  # the one that other devices have
        torch.manual_seed(3)
        with torch.inference_mode():
            model.lora.a.normal_()
            model.lora.b[0].normal_()
        lora: Any = FakeLoraCache(table)
        runner = ModelRunner(model, attention, rows, VOCAB, lora)
        if sizes:
            graphs = DecodeGraphs(model, attention, rows, VOCAB, sizes, lambda: RecordedGraph, lora)
            graphs.capture()
            runner.graphs = graphs
        new = [
            replace(new_row(row, [row + 5], [row, row + 20]), adapter_slot=slot)
            for row, slot in ((0, -1), (1, 0), (2, 2), (3, 1), (4, -1))
        ]
        known = dict.fromkeys(range(5), 1)
        runner.graphs, graphs = None, runner.graphs
        results.append([run(runner, step_of(*((row, 0, 1, True) for row in range(5)), new=new))])
        runner.graphs = graphs
        for batch in ([0, 4], [3, 0, 1], [1], [2, 3], [4, 0], [2, 0, 4, 1], [0]):
            results[-1].append(run(runner, step_of(*((row, known[row], 1, True) for row in batch))))
            for row in batch:
                known[row] += 1
    launched, replayed = results
    for expected, got in zip(launched, replayed, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert runner.graphs is not None
    used = {key: graph.replays for key, (graph, _) in runner.graphs.captured.items()}  # type: ignore[attr-defined]
    assert used == {
        (4, True): 2,
        (4, False): 0,
        (2, True): 1,
        (2, False): 2,
        (1, True): 1,
        (1, False): 1,
    }


def choices(runner: ModelRunner) -> dict[int, int]:
    """How often a graph made the choice, by size."""
    assert runner.graphs is not None
    return {
        size: graph.replays  # type: ignore[attr-defined]
        for (size, _), (graph, _) in runner.graphs.choices.items()
        if graph.replays  # type: ignore[attr-defined]
    }


def mixed_wishes(row: int) -> SamplingParams:
    return GREEDY if row < ROWS // 2 else SamplingParams(temperature=0.0, top_logprobs=2)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_steps_are_chosen_in_a_graph(seed):
    """And the pool has the same tokens, in padded steps, too."""
    results, pools = [], []
    for sizes, choice in ((None, None), ([1, 2, 4, 8], greedy)):
        runner, _, _ = make_runner(sizes, choice=choice)
        workload = Workload(seed, lambda row: GREEDY)
        results.append([run(runner, workload.prompts(10))])
        for _ in range(20):
            results[-1].append(run(runner, workload.decodes(workload.random.randint(1, 8))))
        pools.append(runner.rows.tokens)
    for launched, replayed in zip(*results, strict=True):
        assert replayed.token_ids == launched.token_ids
        assert replayed.logprobs == pytest.approx(launched.logprobs, abs=1e-5)
        assert replayed.top_ids == launched.top_ids
    assert torch.equal(*pools)
    assert choices(runner) == replays(runner)


def test_the_sampler_chooses_where_a_row_wants_more_than_a_greedy_token():
    for wishes in (everything, mixed_wishes):
        expected, got = [], []
        for sizes, found in ((None, expected), ([12], got)):
            runner, _, _ = make_runner(sizes, choice=greedy)
            workload = Workload(4, wishes)
            run(runner, workload.prompts(12))
            found += [run(runner, workload.decodes(12)).token_ids for _ in range(3)]
        assert got == expected
        assert replays(runner) == {12: 3}
        assert choices(runner) == {}


def test_a_grammar_is_not_passed_over_by_a_graph():
    runner, _, _ = make_runner([2], choice=greedy)
    workload = Workload(1, lambda row: GREEDY)
    run(runner, workload.prompts(2))
    allowed = np.zeros((2, -(-VOCAB // 32)), np.int32)
    allowed[0, 0], allowed[1, 1] = 1 << 5, 1 << 3
    launched = runner.launch(workload.decodes(2))
    assert runner.sample(launched, ([0, 1], allowed)).wait().token_ids == [5, 35]
    assert choices(runner) == {}


def test_a_choice_that_is_not_read_yet_is_not_overwritten():
    expected, got = [], []
    for sizes, tokens in ((None, expected), ([4], got)):
        runner, _, _ = make_runner(sizes, choice=greedy)
        workload = Workload(5, lambda row: GREEDY)
        pending = [runner.sample(runner.launch(workload.prompts(3)))]
        for _ in range(8):
            pending.append(runner.sample(runner.launch(workload.decodes(3))))
            tokens.append(pending.pop(0).wait().token_ids)
    assert got == expected
    assert choices(runner) == {4: 8}


@torch.inference_mode()
def test_a_choice_of_nothing_but_nan_is_reported():
    runner, _, model = make_runner([1], choice=greedy)
    workload = Workload(5, lambda row: GREEDY)
    run(runner, workload.prompts(1))
    model.head.fill_(torch.nan)
    result = run(runner, workload.decodes(1))
    assert list(result.errors) == [0]
    assert choices(runner) == {1: 1}
