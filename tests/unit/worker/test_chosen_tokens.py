"""Chosen tokens that are copied to the host while the next steps run, as late as they may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.unit.worker.fake_graphs import RecordedGraph, greedy, is_tensor, storage
from tests.unit.worker.fakes import new_row, step_of
from tests.unit.worker.test_cuda_graphs import GREEDY, VOCAB, make_runner
from tests.unit.worker.test_mixed_graphs import SIZES, Workload
from tgi_cli.worker import result as result_module
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.mixed_graphs import MixedGraphs
from tgi_cli.worker.runner import ModelRunner

CUDA = torch.device("cuda", 0)


class Stream:
    """Its copies are done when they are awaited, and not before."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        assert other.done == len(other.copies), "what it waits for runs at once"

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    def record(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.copies)

    @torch.inference_mode()
    def synchronize(self) -> None:
        for to, source in self.stream.copies[self.stream.done : self.end]:
            to.copy_(source)
        self.stream.done = max(self.stream.done, self.end)


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream whose copies are late."""
    side, streams = Stream(), [Stream()]

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        if streams[-1] is not side:
            return tensor.clone()
        side.copies.append((torch.empty_like(tensor), tensor))
        return side.copies[-1][0]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(result_module, "to_host", to_host)
    return side


def with_graphs() -> tuple[ModelRunner, DecodeGraphs, MixedGraphs]:
    runner, attention, model = make_runner([1, 2, 4, 8], choice=greedy)
    mixed = MixedGraphs(
        model, attention, runner.rows, SIZES, lambda: RecordedGraph, None, VOCAB, greedy
    )
    mixed.capture()
    runner.mixed_graphs = mixed
    assert runner.graphs is not None
    return runner, runner.graphs, mixed


def generate(runner: ModelRunner, seed: int, in_flight: int) -> list[list[int]]:
    workload = Workload(seed, sampled=False)
    found, pending = [], []
    for number in range(30):
        # Only decodes are left in the end.
        if number == 20:
            workload.prompts.clear()
            workload.free.clear()
        step = workload.step(5, 6, draft=False)
        if step.rows:
            pending.append(runner.sample(runner.launch(step)))
        if len(pending) > in_flight:
            found.append(pending.pop(0).wait().token_ids)
    return found + [result.wait().token_ids for result in pending]


@pytest.mark.parametrize(("seed", "in_flight"), [(0, 1), (1, 2)])
def test_tokens_are_not_overwritten_before_they_are_copied(
    seed: int, in_flight: int, late_copies: Stream
) -> None:
    expected = generate(make_runner(None)[0], seed, 0)
    assert not late_copies.copies
    runner, decodes, mixed = with_graphs()
    runner._device, runner._copies = CUDA, late_copies  # type: ignore[assignment]
    assert generate(runner, seed, in_flight) == expected
    for graphs in (decodes, mixed):
        chosen: list[Any] = [graph for graph, _ in graphs.choices.values()]
        assert sum(graph.replays for graph in chosen) > 3


def test_a_step_without_tokens_does_not_end_the_wait(late_copies: Stream) -> None:
    """Its event is recorded beside the copies, and tells nothing of them."""
    results = []
    for sizes in (None, [2]):
        runner, _, _ = make_runner(sizes, choice=greedy)
        if sizes:
            runner._device, runner._copies = CUDA, late_copies  # type: ignore[assignment]
        first = [new_row(0, [3, 4], [0], GREEDY), new_row(1, [9, 8], [1], GREEDY)]
        steps = [
            step_of((0, 0, 2, True), (1, 0, 2, True), new=first),
            step_of((0, 2, 1, True), (1, 2, 1, True)),
            step_of((2, 0, 2, False), new=[new_row(2, [5, 6, 7], [2], GREEDY)]),
            step_of((0, 3, 1, True), (1, 3, 1, True)),
        ]
        pending = [runner.sample(runner.launch(step)) for step in steps]
        results.append([result.wait().token_ids for result in pending])
    expected, got = results
    assert expected[1] != expected[3]
    assert got == expected
    assert any(source.dtype == torch.int32 for _, source in late_copies.copies)


def test_tokens_are_in_none_of_the_graphs_memory() -> None:
    """Any graph may write there, as the next forward pass does beside the copy."""
    _, decodes, mixed = with_graphs()
    kinds: list[Any] = [decodes, mixed]
    graphs: list[Any] = []
    chosen = []
    for kind in kinds:
        graphs += [graph for graph, _ in (*kind.captured.values(), *kind.choices.values())]
        chosen += [output for _, output in kind.choices.values()]
    made = set()
    for graph in graphs:
        for _, args, kwargs, output in graph._calls:
            held = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
            made |= {storage(leaf) for leaf in tree_leaves(output) if is_tensor(leaf)} - held
    assert made
    assert len(chosen) == 4 + len(SIZES)
    assert not made & {storage(output) for output in chosen}
