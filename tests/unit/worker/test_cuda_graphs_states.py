"""Decode steps by graphs of models with recurrent states: their slots are inputs of a graph."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.worker.fake_graphs import PaddedAttention, RecordedGraph, TinyModel
from tests.unit.worker.fakes import CPU, new_row, run, step_of
from tests.unit.worker.test_cuda_graphs import BLOCK, GREEDY, LONGEST, ROWS, SPECS, VOCAB, Workload
from tests.unit.worker.test_cuda_graphs_warmup import Watched, make_worker, play
from tgi_cli.attention import StateCache, StateSpec, StateTensor
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.step import Snapshot, Step
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.upload import Uploader

WIDTH, SLOTS = 16, 3 * ROWS
SPEC = StateSpec((StateTensor("sum", (WIDTH,), torch.float32),))


def carry(states: StateCache, hidden: Tensor) -> Tensor:
    """The states after each token: those of a graph's step in operators that it can hold."""
    if states.planned.on_host:
        output = torch.empty_like(hidden)

        def tokens(some: slice, state: Tensor) -> None:
            for index in range(some.start, some.stop):
                state.mul_(0.5).add_(hidden[index]).tanh_()
                output[index] = state

        states.advance(0, "sum", tokens)
        return output
    step, held = states.planned, states.tensors[0]["sum"]
    after = torch.tanh(states.load(0, "sum") * 0.5 + hidden)
    here = torch.arange(len(held))[:, None] == step.slots_out[None, :]
    written = here.any(1)[:, None]
    held.copy_(torch.where(written, after.index_select(0, here.int().argmax(1)), held))
    return after


class Recurrent(TinyModel):
    """Its hidden states also pass a state of each sequence."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        hidden = super().forward(input_ids, positions, attention)
        return hidden + carry(attention.states, hidden)


class WithStates(PaddedAttention):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.states = StateCache([SPEC], CPU)


def make(sizes: list[int] | None) -> tuple[ModelRunner, StateCache]:
    upload = Uploader(CPU, packed=True)
    rows = InputBatch(ROWS, LONGEST, BLOCK, upload)
    attention = WithStates(SPECS, BLOCK, torch.float32, CPU)
    attention.allocate(ROWS * LONGEST // BLOCK + 3)
    states = attention.states
    assert states is not None
    states.allocate(SLOTS)
    states.tensors[0]["sum"].fill_(torch.nan)
    model = Recurrent(VOCAB)
    runner = ModelRunner(model, attention, rows, VOCAB)
    if sizes:
        graphs = DecodeGraphs(model, attention, rows, VOCAB, sizes, lambda: RecordedGraph)
        graphs.capture()
        runner.graphs = graphs
        assert states.tensors[0]["sum"].isnan().all(), "a capture is of padding"
    return runner, states


class Stateful(Workload):
    """Sequences that now and then move to another slot, or start anew from a fresh state."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda row: GREEDY)
        self.slots: dict[int, int] = {}
        self.free = set(range(SLOTS))

    def prompts(self, count: int) -> Step:
        step = super().prompts(count)
        step.state_in = [-1] * count
        step.state_out = [self.take(row) for row in step.rows]
        return step

    def decodes(self, count: int) -> Step:
        step = super().decodes(count)
        for row in step.rows:
            before = self.slots[row]
            fresh = self.random.random() < 0.1
            step.state_in.append(-1 if fresh else before)
            step.state_out.append(before if self.random.random() < 0.5 else self.take(row))
        self.free |= set(range(SLOTS)) - set(self.slots.values())
        return step

    def take(self, row: int) -> int:
        self.slots[row] = self.random.choice(sorted(self.free))
        self.free.discard(self.slots[row])
        return self.slots[row]


def replays(runner: ModelRunner) -> int:
    assert runner.graphs is not None
    return sum(graph.replays for graph, _ in runner.graphs.captured.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps_carry_states_from_slot_to_slot(seed: int) -> None:
    """Tokens and every slot are as without graphs: padding writes none."""
    results: list[list[Any]] = []
    held = []
    for sizes in (None, [1, 2, 4, 8]):
        runner, states = make(sizes)
        workload = Stateful(seed)
        results.append([run(runner, workload.prompts(8))])
        for _ in range(20):
            results[-1].append(run(runner, workload.decodes(workload.random.randint(1, 8))))
        held.append(states.tensors[0]["sum"])
    assert replays(runner) == 20
    for launched, replayed in zip(*results, strict=True):
        assert replayed.token_ids == launched.token_ids
        assert replayed.logprobs == pytest.approx(launched.logprobs, abs=1e-5)
    torch.testing.assert_close(held[1], held[0], equal_nan=True)
    assert held[0].isnan().any()


def test_slots_of_the_next_step_are_staged_before_the_last_result_is_awaited() -> None:
    expected, got = [], []
    for sizes, tokens in ((None, expected), ([4], got)):
        runner, _ = make(sizes)
        workload = Stateful(5)
        pending = [runner.sample(runner.launch(workload.prompts(3)))]
        for _ in range(8):
            pending.append(runner.sample(runner.launch(workload.decodes(3))))
            tokens.append(pending.pop(0).wait().token_ids)
    assert got == expected
    assert replays(runner) == 8


def test_a_step_with_a_snapshot_is_launched() -> None:
    runner, states = make([2])
    step = Stateful(1).prompts(2)
    run(runner, step)
    row, position = step.rows[0], step.counts[0]
    decode = step_of((row, position, 1, True), state_in=[0], state_out=[1])
    decode.snapshots = [Snapshot(0, 1, 2)]
    decode.appended = []
    states.tensors[0]["sum"][0] = 0.5
    run(runner, decode)
    assert replays(runner) == 0
    assert torch.equal(states.tensors[0]["sum"][1], states.tensors[0]["sum"][2])


def decoded(worker: Any, steps: int = 4) -> list[int]:
    """Prompts, and decodes; every other one moves to other slots."""
    new = [new_row(row, [row + 1, 7, 9], [row]) for row in range(3)]
    entries = [(row, 0, 3, True) for row in range(3)]
    tokens = run(worker, step_of(*entries, new=new, state_in=[-1] * 3, state_out=[0, 1, 2]))
    found = list(tokens.token_ids)
    slots = [0, 1, 2]
    for index in range(steps):
        after = [(slot + 3 * (index % 2)) % 6 for slot in slots]
        decode = step_of(*((row, 3 + index, 1, True) for row in range(3)))
        decode.state_in, decode.state_out = slots, after
        found += run(worker, decode).token_ids
        slots = after
    return found


def test_a_worker_captures_graphs_of_a_model_with_states(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = make_worker(monkeypatch, Recurrent(97), WithStates, cuda_graphs=())
    launched.warmup()
    assert launched.runner.graphs is None
    worker = make_worker(monkeypatch, Recurrent(97), WithStates)
    with caplog.at_level(logging.WARNING):
        capacity = worker.warmup()
    assert not caplog.text
    assert capacity.graphs
    assert worker.runner.graphs is not None
    before = replays(worker.runner)
    assert decoded(worker) == decoded(launched)
    assert replays(worker.runner) == before + 4


def test_an_engine_at_depth_1_replays_steps_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits, snapshots and rows that follow each other in a slot among them."""
    found = []
    for depth, options in ((0, {"cuda_graphs": ()}), (1, {})):
        worker = make_worker(monkeypatch, Recurrent(97), WithStates, **options)
        capacity = worker.warmup()
        limits = SchedulerConfig.of(
            capacity.config, capacity.num_blocks, num_state_slots=capacity.num_state_slots
        )
        watched = Watched(worker)
        found.append(play(watched, limits, depth))
    assert found[0] == found[1]
    assert {len(tokens) for tokens in found[0].values()} == {12}
    assert replays(worker.runner) > 8
    order = {event: index for index, event in enumerate(watched.events)}
    last = max(step for _, step in order)
    assert all(order["launch", step + 1] < order["wait", step] for step in range(1, last))


class OnTheHost(Recurrent):
    """Reads slots on the host, as operations of torch and split modules of transformers do."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        hidden = TinyModel.forward(self, input_ids, positions, attention)
        output = torch.empty_like(hidden)

        def tokens(some: slice, state: Tensor) -> None:
            output[some] = hidden[some] + state

        attention.states.advance(0, "sum", tokens)
        return output


class Baking(Recurrent):
    """Writes the slots that it was captured with, which are none: tokens are right at first."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        step = attention.states.planned
        if step.on_host:
            return super().forward(input_ids, positions, attention)
        slots_out = step.slots_out
        step.slots_out = torch.tensor(slots_out.numpy().copy())
        try:
            return super().forward(input_ids, positions, attention)
        finally:
            step.slots_out = slots_out


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (OnTheHost, "a layer reads the slots of its states on the host"),
        (Baking, "they compute something else than the model"),
    ],
)
def test_a_model_whose_states_no_graph_can_carry_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: type[Recurrent],
    cause: str,
) -> None:
    worker = make_worker(monkeypatch, model(97), WithStates)
    with caplog.at_level(logging.WARNING):
        worker.warmup()
    assert worker.runner.graphs is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert cause in warning
    assert len(decoded(worker)) == 15
