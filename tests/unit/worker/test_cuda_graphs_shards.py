"""Greedy tokens that several shards choose together in graphs, here in threads.

Shards that took different paths through a step would wait for each other: then the test ends with
a broken barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.tools.thread_shards import on_shards
from tests.unit.worker import test_cuda_graphs_warmup as warmup
from tests.unit.worker.fake_graphs import PaddedAttention, RecordedGraph, TinyModel
from tests.unit.worker.fakes import CPU, new_row, run, step_of
from tests.unit.worker.test_cuda_graphs import (
    BLOCK,
    GREEDY,
    LONGEST,
    ROWS,
    SPECS,
    VOCAB,
    Workload,
    choices,
    make_runner,
    replays,
)
from tests.unit.worker.test_mixed_graphs import SIZES, chosen
from tests.unit.worker.test_mixed_graphs import Workload as MixedWorkload
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.step import OptionalOutputs, Step
from tgi_cli.kernels.sample import Tokens
from tgi_cli.sampling import sharded
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.greedy_choice import greedy_choice
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.mixed_graphs import MixedGraphs
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.upload import Uploader

GROUPS: list[Any] = []
LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def operator() -> Iterator[None]:
    """Gathering by an operator: a recorded graph repeats it, as one on a device does."""

    def gather(mine: Tensor, index: int) -> Tensor:
        return torch.cat(GROUPS[index]._exchange(mine))

    library = torch.library.Library("tgi_tests", "DEF")
    library.define("gather(Tensor mine, int index) -> Tensor")
    library.impl("gather", gather, "CPU")
    yield
    library._destroy()  # type: ignore[no-untyped-call, unused-ignore]
    GROUPS.clear()


class RecordedGroup:
    """A shard's group whose gathering can be recorded; counts what the first shard sends."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.broadcasts = 0
        with LOCK:
            self._index = len(GROUPS)
            GROUPS.append(group)

    def _allgather_base(self, output: Tensor, tensor: Tensor) -> Any:
        output.copy_(torch.ops.tgi_tests.gather(tensor, self._index))
        return _Done()

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        self.broadcasts += 1
        return self._group.broadcast(tensor, root)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class _Done:
    def wait(self) -> bool:
        return True


class Divided(TinyModel):
    """The whole of a model's layers, and a shard's part of the head."""

    def __init__(self, whole: TinyModel, shard: Shard) -> None:
        self.__dict__.update(whole.__dict__)
        self.shard = shard
        self.width = -(-self.vocab_size // shard.size)
        first = shard.rank * self.width
        self.own_vocabulary = range(first, min(first + self.width, self.vocab_size))

    def own_logits(self, hidden: Tensor) -> Tensor:
        own = self.own_vocabulary
        return (hidden @ self.head[:, own.start : own.stop]).float()

    def logits(self, hidden: Tensor) -> Tensor:
        own = self.own_logits(hidden)
        padded = functional.pad(own, (0, self.width - own.shape[1]))
        return self.shard.all_gather(padded)[:, : self.vocab_size]


def find(logits: Tensor) -> Tokens:
    """As :func:`tgi_cli.sampling.sampler.summarize`, by operators that can be recorded."""
    token_ids, peaks = logits.argmax(-1), logits.amax(-1)
    log_sums = (logits - peaks[:, None]).exp().sum(-1).log()
    return Tokens(token_ids, -log_sums, peaks, log_sums)


@pytest.fixture(autouse=True)
def recordable(monkeypatch: pytest.MonkeyPatch) -> None:
    given = sharded.ShardedGreedy.__init__
    monkeypatch.setattr(
        sharded.ShardedGreedy,
        "__init__",
        lambda self, shard, first: given(self, shard, first, find),
    )


def shard_runner(whole: TinyModel, shard: Shard) -> tuple[ModelRunner, RecordedGroup]:
    """The runner of one shard, with graphs of decodes and of steps with prompts."""
    group = shard.group = RecordedGroup(shard.group)  # type: ignore[assignment]
    rows = InputBatch(ROWS, LONGEST, BLOCK, Uploader(CPU, packed=True))
    attention = PaddedAttention(SPECS, BLOCK, torch.float32, CPU)
    attention.allocate(ROWS * LONGEST // BLOCK + 3)
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.zero_()
    model: Any = Divided(whole, shard)
    runner = ModelRunner(model, attention, rows, VOCAB, shard=shard)
    width, choose, own_logits = greedy_choice(model, shard, VOCAB)
    assert width == model.width
    given = (lambda: RecordedGraph), None
    decodes = DecodeGraphs(model, attention, rows, width, [1, 2, 4, 8], *given, choose, own_logits)
    decodes.capture()
    mixed = MixedGraphs(model, attention, rows, SIZES, *given, width, choose, own_logits)
    mixed.capture()
    runner.graphs, runner.mixed_graphs = decodes, mixed
    return runner, group


def on_two(work: Callable[[Shard], Any]) -> tuple[Any, Any]:
    first, second = on_shards(2, work)
    return first, second


@pytest.mark.parametrize("seed", range(2))
def test_decodes_and_steps_with_prompts_are_chosen_in_graphs_of_all_shards(seed: int) -> None:
    """As by one process; nothing is sent from the first shard to the others afterwards."""
    whole = TinyModel(VOCAB)

    def play(runner: ModelRunner) -> list[Any]:
        workload, found = Workload(seed, lambda row: GREEDY), []
        found.append(run(runner, workload.prompts(10)))
        for _ in range(12):
            found.append(run(runner, workload.decodes(workload.random.randint(1, 8))))
        mixed = MixedWorkload(seed, sampled=False)
        for number in range(16):
            step = mixed.step(number % 6, 14, draft=number % 3 == 0)
            if step.rows:
                found.append(run(runner, step))
        return found

    def work(shard: Shard) -> Any:
        runner, group = shard_runner(whole, shard)
        found = play(runner)
        graphs = sum(replays(runner).values()), sum(choices(runner).values()), chosen(runner)
        return found, runner.rows.tokens.clone(), graphs, group.broadcasts

    (found, pool, graphs, broadcasts), (other, other_pool, *others) = on_two(work)
    alone, _, _ = make_runner(None)
    expected = play(alone)
    for got, wanted in zip(found, expected, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    assert all(not got.token_ids for got in other), "the first shard alone reports"
    assert torch.equal(pool, other_pool)
    assert torch.equal(pool, alone.rows.tokens)
    replayed, decodes, mixed = graphs
    assert replayed == decodes >= 12
    assert mixed > 4
    assert [*others] == [graphs, broadcasts]
    sampled = sum(bool(wanted.token_ids) for wanted in expected)
    assert broadcasts == sampled - decodes - mixed, "only where the sampler has chosen"


def always_31(request_id: int, logits: Tensor, token_ids: Any, client_id: Any) -> Tensor:
    logits[:] = 0.0
    logits[31] = 9.0
    return logits


def test_what_the_first_shard_alone_knows_keeps_all_shards_from_choosing_in_graphs() -> None:
    """A mask, a logits processor and reported logits, beside a row that wants nothing."""
    whole = TinyModel(VOCAB)
    allowed = np.zeros((1, -(-VOCAB // 32)), np.int32)
    allowed[0, 1] = 1 << 3
    kinds = {
        "a mask": OptionalOutputs(),
        "a processor": OptionalOutputs(logits_processors=(always_31,)),
        "logits": OptionalOutputs(return_generation_logits=True),
        "nothing": OptionalOutputs(),
    }

    def play(runner: ModelRunner, leads: bool) -> dict[str, list[int]]:
        found = {}
        for kind, extras in kinds.items():
            given = extras if leads else OptionalOutputs()  # as messages to other shards have it
            new = [
                replace(new_row(0, [3, 4], [0]), extras=given),
                new_row(7, [9, 8], [1]),
            ]
            step: Step = step_of((0, 0, 2, True), (7, 0, 2, True), new=new)
            step.reads_logits = kind != "nothing"
            run(runner, step)
            step = step_of((0, 2, 1, True), (7, 2, 1, True))
            step.reads_logits = kind != "nothing"
            masks = ([0], allowed) if leads and kind == "a mask" else None
            result = runner.sample(runner.launch(step), masks).wait()
            found[kind] = result.token_ids
            if leads and kind == "logits":
                assert len(result.generation_logits[0]) == VOCAB
        return found

    def work(shard: Shard) -> Any:
        runner, _ = shard_runner(whole, shard)
        return play(runner, shard.leads), runner.rows.tokens.clone(), choices(runner)

    (found, pool, graphs), (_, other_pool, other_graphs) = on_two(work)
    assert torch.equal(pool, other_pool)
    assert graphs == other_graphs == {2: 1}
    alone, _, _ = make_runner(None)
    assert found == play(alone, leads=True)
    assert found["a mask"][0] == 35
    assert found["a processor"][0] == 31


def test_sampled_rows_are_the_samplers() -> None:
    whole = TinyModel(VOCAB)

    def wishes(row: int) -> SamplingParams:
        return SamplingParams(temperature=0.5, seed=row) if row % 2 else GREEDY

    def play(runner: ModelRunner) -> list[list[int]]:
        workload = Workload(3, wishes)
        run(runner, workload.prompts(8))
        return [run(runner, workload.decodes(8)).token_ids for _ in range(4)]

    def work(shard: Shard) -> Any:
        runner, group = shard_runner(whole, shard)
        return play(runner), choices(runner), runner.rows.tokens.clone(), group.broadcasts

    (found, graphs, pool, broadcasts), (_, _, other_pool, _) = on_two(work)
    alone, _, _ = make_runner(None)
    assert found == play(alone)
    assert graphs == {}
    assert broadcasts == 5
    assert torch.equal(pool, other_pool)


class Undivided(Divided):
    """As a model that does not say which part of the logits is a shard's."""

    def __init__(self, whole: TinyModel, shard: Shard) -> None:
        super().__init__(whole, shard)
        self.parts, self.own_vocabulary = self.own_vocabulary, None  # type: ignore[assignment]

    def own_logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.head[:, self.parts.start : self.parts.stop]).float()


@pytest.mark.parametrize("kind", [Divided, Undivided])
def test_shards_choose_in_graphs_after_warm_up(
    monkeypatch: pytest.MonkeyPatch, kind: type[Divided]
) -> None:
    """Graphs agree with eager steps at warm-up; a model that has no parts keeps the sampler."""
    whole = TinyModel(97)
    alone = warmup.make_worker(monkeypatch, model=whole, cuda_graphs=())
    alone.warmup()
    expected = warmup.decoded(alone)

    def work(shard: Shard) -> Any:
        shard.group = RecordedGroup(shard.group)  # type: ignore[assignment]
        worker = warmup.make_worker(monkeypatch, model=kind(whole, shard), shard=shard)
        worker.warmup()
        graphs = worker.runner.graphs
        assert graphs is not None
        tokens = warmup.decoded(worker)
        return tokens, sum(graph.replays for graph, _ in graphs.choices.values())  # type: ignore[attr-defined]

    (tokens, replayed), (others, _) = on_two(work)
    assert tokens == expected
    assert others == []
    assert replayed == (2 if kind is Divided else 0), "the check, and the decode"
