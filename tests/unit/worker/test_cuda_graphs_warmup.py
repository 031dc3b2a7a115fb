"""How a worker comes by its graphs at warm-up, and does without them where it must."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.config.test_resolve import MODEL
from tests.unit.worker.fake_graphs import (
    PaddedAttention,
    RecordedGraph,
    RefuseWaiting,
    Syncing,
    TinyModel,
    greedy,
)
from tests.unit.worker.fakes import CPU, new_row, run, step_of
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.attention import KVSpec
from tgi_cli.attention.reference import ReferenceAttention
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown
from tgi_cli.engine.step import Step
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker import graph_capture, greedy_choice
from tgi_cli.worker import worker as worker_module
from tgi_cli.worker.sizing import kv_cache
from tgi_cli.worker.worker import LoadedModel, ModelWorker

SPECS = [KVSpec(TinyModel.KV_HEADS, TinyModel.DIM)] * 2


class Other(Shard):
    """A shard whose sister never can."""

    def smallest(self, value: int) -> int:
        return 0 if value in (0, 1) else value

    def total(self, value: int) -> int:
        return value


def make_worker(
    monkeypatch: pytest.MonkeyPatch,
    model: Any = None,
    attention: type[ReferenceAttention] = PaddedAttention,
    shard: Shard | None = None,
    graph: Any = RecordedGraph,
    **config: Any,
) -> ModelWorker:
    monkeypatch.setitem(worker_module.GRAPH_FACTORIES, "cpu", lambda: graph)
    monkeypatch.setattr(greedy_choice, "greedy", greedy)
    for module in (kv_cache, worker_module, graph_capture):  # a whole collection each time
        monkeypatch.setattr(module, "release_unused_memory", lambda device: None)
    config = {
        "dtype": "float32",
        "max_batch_size": 6,
        "max_total_tokens": 100,
        "max_input_tokens": 99,
        "max_batch_prefill_tokens": 64,
        "max_batch_total_tokens": 800,
        "speculate": 0,  # warm-up times no steps
        **config,
    }
    return ModelWorker(
        replace(CONFIG, device="cpu", **config),
        LoadedModel(
            replace(MODEL, vocab_size=97),
            model or TinyModel(97),
            attention(SPECS, 16, torch.float32, CPU),
        ),
        shard=shard or Shard(),
    )


def decoded(worker: ModelWorker) -> list[int]:
    """Prompts, and a decode."""
    new = [new_row(row, [row + 1, 7, 9], [row]) for row in range(3)]
    tokens = run(worker, step_of(*((row, 0, 3, True) for row in range(3)), new=new)).token_ids  # type: ignore[arg-type]
    decode = step_of(*((row, 3, 1, True) for row in range(3)))
    return tokens + run(worker, decode).token_ids  # type: ignore[arg-type]


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    worker = make_worker(monkeypatch, cuda_graphs=())
    worker.warmup()
    assert worker.runner.graphs is None
    return decoded(worker)


def test_graphs_are_captured_over_the_cache_that_is_served(monkeypatch, caplog, expected):
    caplog.set_level(logging.INFO)
    worker = make_worker(monkeypatch)
    capacity = worker.warmup()
    assert capacity.num_blocks == 50
    graphs = worker.runner.graphs
    assert graphs is not None
    assert graphs.sizes == [1, 2, 4, 6]
    assert "CUDA graphs of 4 sizes up to 6 rows" in caplog.text
    assert decoded(worker) == expected
    graph: Any = graphs.captured[4, False][0]
    assert graph.replays == 2, "the check, and the decode"


def test_explicit_graph_sizes_are_used(monkeypatch):
    worker = make_worker(monkeypatch, cuda_graphs=(2, 1))
    worker.warmup()
    assert worker.runner.graphs is not None
    assert worker.runner.graphs.sizes == [1, 2]


def test_memory_of_graphs_is_subtracted_from_the_cache(monkeypatch):
    seen = []

    def budget(config: Any, available: int, activations: int, total: int) -> int:
        seen.append(activations)
        return 1 << 30

    monkeypatch.setattr(kv_cache, "cache_budget", budget)
    monkeypatch.setattr(kv_cache.PeakMeter, "read", lambda self: 0)
    monkeypatch.setattr("tgi_cli.worker.cuda_graphs.DecodeGraphs.measure", lambda self: 12000)
    monkeypatch.setattr("tgi_cli.worker.mixed_graphs.MixedGraphs.measure", lambda self: 345)
    assert make_worker(monkeypatch).warmup().activation_bytes == 12345
    assert seen == [12345]


class Baking(TinyModel):
    """Remembers the length that it was captured with."""

    longest = 0

    def forward(self, input_ids, positions, attention, images=None):
        if attention.rows is None:
            self.longest = int(positions.max())
        return super().forward(input_ids, positions, attention) * (1 + self.longest)


class NoMemory(RecordedGraph):
    def capture(self, work):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"model": Syncing(97)}, "not permitted when stream is capturing"),
        ({"model": Baking(97)}, "something else than the model"),
        ({"graph": NoMemory}, "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"),
        ({"attention": ReferenceAttention}, "ReferenceAttention has no steps of a fixed size"),
        ({"shard": Other()}, "another shard"),
    ],
)
def test_without_graphs_steps_run_eagerly_and_one_warning_names_the_cause(
    monkeypatch, caplog, expected, how, cause
):
    worker = make_worker(monkeypatch, **how)
    worker.warmup()
    assert worker.runner.graphs is None
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert cause in warnings[0]
    assert "without CUDA graphs" in warnings[0]
    assert "\n" not in warnings[0]
    if "model" not in how:
        assert decoded(worker) == expected


def test_a_cpu_has_no_cuda_graphs():
    assert "cpu" not in worker_module.GRAPH_FACTORIES


class Watched:
    """A worker that notes what the core loop asks of it, in order."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self.events: list[tuple[str, int]] = []

    def launch(self, step: Step) -> object:
        self.events.append(("launch", step.step_id))
        return step.step_id, self.worker.launch(step)

    def sample(self, handle: Any, masks: Any = None) -> Any:
        step_id, launched = handle
        return Awaited(self, step_id, self.worker.sample(launched, masks))


class Awaited:
    def __init__(self, watched: Watched, step_id: int, pending: Any) -> None:
        self.watched, self.step_id, self.pending = watched, step_id, pending

    def wait(self) -> Any:
        self.watched.events.append(("wait", self.step_id))
        return self.pending.wait()


def play(worker: Any, limits: SchedulerConfig, depth: int) -> dict[int, list[int]]:
    core = EngineCore(worker, limits, depth)
    tokens: dict[int, list[int]] = {request: [] for request in range(5)}
    for request in tokens:
        sampling = SamplingParams(temperature=0.5 * (request % 2), seed=request)
        prompt = tuple(range(1, 4 + 6 * request))
        core.inbox.put(
            GenerationRequest(
                request_id=request, prompt_ids=prompt, sampling=sampling, max_new_tokens=12
            )
        )
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    ended = 0
    while ended < len(tokens):
        outputs = core.outbox.get(timeout=60)
        assert outputs is not None
        assert not any(end.error for end in outputs.finished)
        for request, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            tokens[request].append(token)
        ended += len(outputs.finished)
    core.inbox.put(Shutdown())
    thread.join(60)
    return tokens


def test_the_next_step_is_replayed_before_the_last_ones_tokens_are_read(monkeypatch):
    launched = make_worker(monkeypatch, cuda_graphs=())
    capacity = launched.warmup()
    limits = SchedulerConfig.of(capacity.config, capacity.num_blocks)
    expected = play(launched, limits, depth=0)
    assert {len(tokens) for tokens in expected.values()} == {12}
    replayed = make_worker(monkeypatch)
    replayed.warmup()
    watched = Watched(replayed)
    assert play(watched, limits, depth=1) == expected
    order = {event: index for index, event in enumerate(watched.events)}
    last = max(step for _, step in order)
    ahead = [order["launch", step + 1] < order["wait", step] for step in range(1, last)]
    assert all(ahead), "the device always has the next step before the host asks for the last"
    graphs = replayed.runner.graphs
    assert graphs is not None
    assert sum(graph.replays for graph, _ in graphs.captured.values()) > 8  # type: ignore[attr-defined]


def test_a_model_that_waits_is_refused_before_anything_is_captured(monkeypatch):
    """A failed capture costs more than an error, on a device whose library is of torch 2.11."""
    captures = []

    class Counted(RecordedGraph):
        def capture(self, work):
            captures.append(1)
            return super().capture(work)

    modes = []

    @contextmanager
    def watched(device):
        modes.append(device)
        with RefuseWaiting():
            yield

    monkeypatch.setattr(graph_capture, "no_waiting", watched)
    worker = make_worker(monkeypatch, model=Syncing(97), graph=Counted)
    worker.warmup()
    assert worker.runner.graphs is None
    assert modes
    assert not captures


def test_no_graph_is_larger_than_the_batches_that_memory_allows(monkeypatch):
    """Warm-up lowers the limit of rows where states or memory are short."""
    worker = make_worker(monkeypatch, max_batch_size=32)
    size = kv_cache.KVCacheSizing.size

    def lowered(self: Any) -> Any:
        sized = size(self)
        return sized._replace(config=replace(sized.config, max_batch_size=5))

    monkeypatch.setattr(kv_cache.KVCacheSizing, "size", lowered)
    worker.warmup()
    graphs, mixed = worker.runner.graphs, worker.runner.mixed_graphs
    assert graphs is not None
    assert graphs.sizes == [1, 2, 4, 5]
    assert {size for size, _ in graphs.captured} == {1, 2, 4, 5}
    assert mixed is not None
    assert {size.decodes for size in mixed.captured} == {5}


class NoMixed(PaddedAttention):
    def plan_fixed(self, metadata, max_context):
        raise ValueError("no steps of unknown lengths")


def test_without_graphs_of_prompts_those_of_decodes_remain(monkeypatch, caplog, expected):
    caplog.set_level(logging.INFO)
    worker = make_worker(monkeypatch, attention=NoMixed)
    assert worker.warmup().graphs
    assert worker.runner.graphs is not None
    assert worker.runner.mixed_graphs is None
    assert "steps with prompts run without CUDA graphs: ValueError: no steps" in caplog.text
    assert decoded(worker) == expected


class BakingPrompts(TinyModel):
    """Computes something else in a capture of steps with prompts."""

    def forward(self, input_ids, positions, attention, images=None):
        fixed = attention.fixed
        if fixed is not None and fixed.num_decodes < len(fixed.kv_lens):
            return super().forward(input_ids, positions, attention) * 2
        return super().forward(input_ids, positions, attention)


def test_graphs_of_prompts_that_compute_something_else_are_not_used(monkeypatch, caplog, expected):
    caplog.set_level(logging.INFO)
    worker = make_worker(monkeypatch, model=BakingPrompts(97))
    worker.warmup()
    assert worker.runner.mixed_graphs is None
    assert "with prompts run without CUDA graphs: they compute something else" in caplog.text
    assert decoded(worker) == expected
