"""Positions and spans of rows with images; transformers' get_rope_index is the oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.glm46v.modeling_glm46v import Glm46VModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from tests.unit.worker.fakes import GREEDY, new_row, step_of
from tgi_cli.engine.step import RowImage, Step
from tgi_cli.worker.image_positions import ImagePositions, image_positions

ROWS = 6
MODELS = [Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel, Qwen3_5Model, Glm4vModel, Glm46VModel]


def layout(seed: int, images: int) -> tuple[int, tuple[RowImage, ...]]:
    """A prompt's length, and images with text around them, or none before or behind."""
    dice, token, made = random.Random(seed), 0, []
    for number in range(images):
        token += dice.randint(number > 0, 9)  # transformers takes neighbours for one
        grid = dice.choice([(1, 1), (1, 7), (6, 1), (3, 4), (5, 5)])
        made.append(RowImage(((token, grid[0] * grid[1]),), grid))
        token += grid[0] * grid[1]
    return token + dice.randint(0, 9), tuple(made)


def theirs(model: Any, length: int, images: tuple[RowImage, ...]) -> tuple[np.ndarray, int]:
    """transformers' positions [3, length], and what it adds to those of later tokens."""
    kinds, grids = torch.zeros(1, length, dtype=torch.int64), []
    for image in images:
        ((start, count),) = image.spans
        kinds[0, start : start + count] = 1
        assert image.grid is not None
        grids.append([1, image.grid[0] * 2, image.grid[1] * 2])
    stand_in = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
        )
    )
    stand_in.get_vision_position_ids = partial(model.get_vision_position_ids, stand_in)
    positions, deltas = model.get_rope_index(
        stand_in, torch.zeros(1, length, dtype=torch.int64), kinds, torch.tensor(grids)
    )
    return positions[:, 0].numpy(), int(deltas[0])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_positions_are_transformers(model: Any, seed: int) -> None:
    length, images = layout(seed, 1 + seed % 3)
    wanted, delta = theirs(model, length, images)
    places = ImagePositions(ROWS, axes=3)
    places.put(replace(new_row(2, [0] * length, [], GREEDY), images=images))
    step = step_of((2, 0, length, True))
    got = places.rope(step, np.full(length, 2), np.arange(length))
    if (wanted == wanted[0]).all():
        assert got.ndim == 1
    np.testing.assert_array_equal(np.broadcast_to(got, (3, length)), wanted)
    assert places.shifts[2] == delta
    for position in range(length, length + 3):
        one = step_of((2, position, 1, True))
        got = places.rope(one, np.array([2]), np.array([position]))
        assert got.tolist() == [position + delta]


def test_chunks_beside_other_rows_have_the_positions_of_the_whole() -> None:
    length, images = layout(5, 3)
    whole = image_positions(images)
    places = ImagePositions(ROWS, axes=3)
    places.put(new_row(0, [0] * 50, [], GREEDY))
    places.put(replace(new_row(4, [0] * length, [], GREEDY), images=images))
    dice, start = random.Random(1), 0
    shift = int(places.shifts[4])
    while start < length:
        count = min(dice.randint(1, 6), length - start)
        step = step_of((0, 40, 1, True), (4, start, count, False), (0, 20, 3, False))
        rows = np.array([0, *[4] * count, 0, 0, 0])
        positions = np.array([40, *range(start, start + count), 20, 21, 22])
        got = np.broadcast_to(places.rope(step, rows, positions), (3, len(rows)))
        assert got[:, [0, -3, -2, -1]].tolist() == [[40, 20, 21, 22]] * 3
        for token in range(count):
            at = start + token
            wanted = whole[:, at].tolist() if at < whole.shape[1] else [at + shift] * 3
            assert got[:, 1 + token].tolist() == wanted
        assert places.plain(step) == (places.rope(step, rows, positions).ndim == 1)
        start += count


def test_a_freed_row_leaves_nothing_behind() -> None:
    length, images = layout(3, 2)
    places = ImagePositions(ROWS, axes=3, spans=True)
    seen = tuple(image._replace(bidirectional=True) for image in images)
    places.put(replace(new_row(1, [0] * length, [], GREEDY), images=seen))
    assert places.shifted
    assert not places.empty
    places.put(new_row(1, [0] * length, [], GREEDY))  # another sequence
    assert places.empty
    assert not places.shifts.any()
    places.put(replace(new_row(1, [0] * length, [], GREEDY), images=seen))
    places.free(1)
    assert places.empty
    assert not places.shifts.any()


def test_images_change_nothing_where_the_model_has_one_axis_and_no_spans() -> None:
    length, images = layout(4, 2)
    seen = tuple(image._replace(bidirectional=True) for image in images)
    places = ImagePositions(ROWS)
    places.put(replace(new_row(1, [0] * length, [], GREEDY), images=seen))
    step = step_of((1, 0, length, True))
    assert places.rope(step, np.full(length, 1), np.arange(length)).tolist() == [*range(length)]
    assert places.visible_until(step) is None
    assert places.plain(step)


@pytest.mark.parametrize(
    "image",
    [
        RowImage(((3, 6),)),
        RowImage(((3, 6),), (2, 2)),
        RowImage(((3, 3), (7, 3)), (2, 3)),
    ],
)
def test_images_that_are_no_grid_are_refused(image: RowImage) -> None:
    places = ImagePositions(ROWS, axes=3)
    with pytest.raises(ValueError, match=r"image"):
        places.put(replace(new_row(1, [0] * 20, [], GREEDY), images=(image,)))


def spans_of(step: Step, places: ImagePositions) -> list[int] | None:
    until = places.visible_until(step)
    if until is None:
        return None
    assert until.dtype == np.int32
    listed: list[int] = until.tolist()
    return listed


def test_tokens_of_an_image_are_seen_to_its_end() -> None:
    places = ImagePositions(ROWS, spans=True)
    images = (
        RowImage(((2, 3),), bidirectional=True),
        RowImage(((6, 2),)),
        RowImage(((9, 2), (12, 1)), bidirectional=True),
    )
    places.put(replace(new_row(3, [0] * 20, [], GREEDY), images=images))
    none = [-1] * 2
    assert spans_of(step_of((3, 0, 20, True)), places) == [
        *none, 4, 4, 4, -1, *none, -1, 10, 10, -1, 12, *[-1] * 7
    ]  # fmt: skip
    # Of an entry behind a decode, from within the first image on.
    step = step_of((0, 30, 1, True), (3, 3, 2, False))
    assert spans_of(step, places) == [-1, 4, 4]
    assert not places.plain(step)
    step = step_of((0, 30, 1, True), (3, 13, 7, True))
    assert spans_of(step, places) is None
    assert places.plain(step)
    with pytest.raises(ValueError, match="ends within"):
        places.visible_until(step_of((3, 0, 4, False)))


def test_whole_prompts_are_seen_whole_with_and_without_images() -> None:
    places = ImagePositions(ROWS, spans=True, whole_prompts=True)
    places.put(replace(new_row(0, [0] * 9, [], GREEDY), prompt_tokens=6))  # resumed
    assert spans_of(step_of((0, 0, 9, True)), places) == [5] * 6 + [-1] * 3
    assert spans_of(step_of((0, 4, 3, True)), places) == [5, 5, -1]
    assert spans_of(step_of((0, 9, 1, True)), places) is None
