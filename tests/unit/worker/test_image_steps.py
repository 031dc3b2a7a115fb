"""Steps of rows with images: inputs of every kind of step, and replayed graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.unit.worker.fake_graphs import RecordedGraph
from tests.unit.worker.fakes import CPU, GREEDY, new_row, run, step_of
from tests.unit.worker.test_cuda_graphs import BLOCK, ROWS, make_runner, replays
from tgi_cli.engine.step import NewRow, RowImage, Step, TokenAppend
from tgi_cli.worker.image_positions import ImagePositions
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.mixed_graphs import MixedGraphs, MixedSize
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.step_inputs import InputPreparer, StepBatch, StepInputs
from tgi_cli.worker.upload import Uploader

IMAGE = RowImage(((3, 6),), (2, 3), bidirectional=True)
"""Six tokens that take three positions."""
TOKENS = [5, 6, 7, 0, 0, 0, 0, 0, 0, 8, 9]


def with_image(row: int, blocks: list[int]) -> NewRow:
    return replace(new_row(row, TOKENS, blocks, GREEDY), images=(IMAGE,))


def inputs_of(step: Step, rows: InputBatch, preparer: InputPreparer) -> StepInputs:
    rows.apply(step)
    return preparer.prepare(StepBatch(step, np.array(step.rows)))


def make(**kind: Any) -> tuple[InputBatch, InputPreparer]:
    places = ImagePositions(4, **kind)
    rows = InputBatch(4, 60, 4, Uploader(CPU), image_positions=places)
    return rows, InputPreparer(rows)


def test_steps_have_the_positions_of_images_and_the_slots_of_tokens() -> None:
    rows, preparer = make(axes=3)
    new = [with_image(1, [3, 4, 5]), new_row(2, [1, 2, 3], [9], GREEDY)]
    ready = inputs_of(step_of((1, 0, 5, False), (2, 0, 3, True), new=new), rows, preparer)
    assert ready.positions.tolist() == [
        [0, 1, 2, 3, 3, 0, 1, 2], [0, 1, 2, 3, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]
    ]  # fmt: skip
    assert ready.metadata.slot_mapping.tolist() == [12, 13, 14, 15, 16, 36, 37, 38]
    assert ready.metadata.visible_until is None
    ready = inputs_of(step_of((2, 3, 1, True), (1, 5, 6, True)), rows, preparer)
    assert ready.positions[0].tolist() == [3, 3, 3, 3, 3, 6, 7]
    assert ready.positions[1].tolist() == [3, 3, 4, 4, 4, 6, 7]
    assert ready.positions[2].tolist() == [3, 5, 3, 4, 5, 6, 7]
    assert ready.metadata.slot_mapping.tolist() == [39, 17, 18, 19, 20, 21, 22]
    for start in (11, 12):  # the second goes on with the arrays of the first
        ready = inputs_of(step_of((1, start, 1, True), (2, start - 7, 1, True)), rows, preparer)
        assert ready.positions.tolist() == [start - 3, start - 7]
        assert ready.metadata.kv_lens.tolist() == [start + 1, start - 6]
        assert ready.metadata.slot_mapping[0] == (20 + start % 4 if start < 12 else start % 4)
        assert ready.targets.tolist() == [rows.width + start + 1, 2 * rows.width + start - 6]


def test_drafts_behind_images_are_shifted_as_decodes_are() -> None:
    rows, preparer = make(axes=3)
    inputs_of(step_of((1, 0, 11, True), new=[with_image(1, [3, 4, 5, 6])]), rows, preparer)
    step = step_of((1, 11, 3, True))
    step.num_decodes, step.samples = 1, [3]
    step.drafts.append(TokenAppend(1, 12, [21, 22]))
    ready = inputs_of(step, rows, preparer)
    assert ready.positions.tolist() == [8, 9, 10]
    assert ready.metadata.slot_mapping.tolist() == [23, 24, 25]


def test_a_resumed_row_has_the_positions_that_it_had() -> None:
    rows, preparer = make(axes=3)
    resumed = replace(with_image(1, [3, 4, 5, 6]), token_ids=[*TOKENS, 30, 31])
    ready = inputs_of(step_of((1, 0, 13, True), new=[resumed]), rows, preparer)
    assert ready.positions[:, 9:].tolist() == [[6, 7, 8, 9]] * 3
    after = inputs_of(
        step_of((1, 0, 3, True), freed=[1], new=[new_row(1, [4, 5, 6], [3])]), rows, preparer
    )
    assert after.positions.tolist() == [0, 1, 2]


def test_steps_with_tokens_that_see_each_other_say_so() -> None:
    rows, preparer = make(spans=True)
    new = [with_image(1, [3, 4, 5]), new_row(2, [1, 2, 3], [9], GREEDY)]
    ready = inputs_of(step_of((2, 0, 3, True), (1, 0, 11, True), new=new), rows, preparer)
    until = ready.metadata.visible_until
    assert until is not None
    assert until.dtype == torch.int32
    assert until.tolist() == [-1] * 6 + [8] * 6 + [-1] * 2
    assert ready.positions.tolist() == [0, 1, 2, *range(11)]
    ready = inputs_of(step_of((2, 3, 1, True), (1, 11, 1, True)), rows, preparer)
    assert ready.metadata.visible_until is None


def start(sizes: list[int] | None, mixed: bool) -> ModelRunner:
    runner, attention, model = make_runner(sizes)
    runner.rows.image_positions = ImagePositions(ROWS, axes=3)
    if mixed:
        graphs = MixedGraphs(
            model, attention, runner.rows, [MixedSize(2, 16)], lambda: RecordedGraph
        )
        graphs.capture()
        runner.mixed_graphs = graphs
    return runner


def test_replayed_steps_go_on_behind_images_as_eager_ones_do() -> None:
    blocks = -(-len(TOKENS) // BLOCK) + 2
    results: list[list[Any]] = []
    for graphs in (False, True):
        runner = start([1, 2, 4] if graphs else None, graphs)
        new = [with_image(3, list(range(blocks))), new_row(5, [4, 5], [20, 21], GREEDY)]
        results.append([run(runner, step_of((3, 0, 11, True), (5, 0, 2, True), new=new))])
        assert runner.mixed_graphs is None or not replays_of(runner), "the step has an image"
        results[-1] += [
            run(runner, step_of((3, at, 1, True), (5, at - 9, 1, True))) for at in (11, 12)
        ]
        more = [new_row(7, [9, 8, 7], [30], GREEDY)]
        results[-1].append(run(runner, step_of((3, 13, 1, True), (7, 0, 3, True), new=more)))
    assert sum(replays(runner).values()) == 2
    assert replays_of(runner) == 1, "decodes behind an image, and a text"
    for eager, replayed in zip(*results, strict=True):
        assert replayed.token_ids == eager.token_ids
        np.testing.assert_allclose(replayed.logprobs, eager.logprobs, atol=1e-5)


def replays_of(runner: ModelRunner) -> int:
    assert runner.mixed_graphs is not None
    made: list[Any] = [graph for graph, _ in runner.mixed_graphs.captured.values()]
    return sum(graph.replays for graph in made)
