"""Images on the worker: slices, features by key, and the rows that a step's tokens stand for."""

from __future__ import annotations

import time
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.worker.fake_tower import WIDTH, TinyTower, pixels
from tests.unit.worker.fakes import CPU, VOCAB, make_runner, new_row, next_token, run, step_of
from tgi_cli.engine.image_slices import EncodeReport, EncodeSlice, ImageSpan
from tgi_cli.engine.step import NewRow, RowImage, Step
from tgi_cli.models.base import ImageRows
from tgi_cli.models.vision import ImageFeatures
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.images import ImageEncoder
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.upload import Uploader


@pytest.fixture
def tower():
    return TinyTower()


@pytest.fixture
def encoder(tower):
    encoder = ImageEncoder(tower, CPU)
    yield encoder
    encoder.close()


def whole(key: int, rows: int, seed: int = 0) -> EncodeSlice:
    return EncodeSlice(key, rows, 4, True, pixels(seed, rows))


def step(*encodes: EncodeSlice, counts: tuple[int, ...] = (), **more: Any) -> Step:
    rows = list(range(len(counts)))
    return Step(0, encodes=list(encodes), rows=rows, counts=list(counts), **more)


def timed(encoder: ImageEncoder, part: EncodeSlice, elapsed: float = 0.0) -> EncodeReport:
    """The report on a slice in a step that was launched so many seconds ago."""
    given = step(part)
    report = encoder.run(given).report
    return encoder.run_timed(given, time.perf_counter() - elapsed, report)


def rows_of(encoder: ImageEncoder, key: int, count: int) -> ImageRows:
    images = [ImageSpan(0, 0, count, key, 0)]
    found = encoder.run(step(counts=(count,), images=images)).rows
    assert found is not None
    return found


def expected(tower: TinyTower, seed: int, rows: int) -> ImageFeatures:
    values = torch.from_numpy(pixels(seed, rows)["pixel_values"])
    with torch.inference_mode():
        return tower.encode({"pixel_values": values}, rows)


def same(found: ImageRows, wanted: ImageFeatures, first: int = 0, end: int | None = None) -> bool:
    pairs = zip((found.features, *found.deepstack), (wanted.rows, *wanted.deepstack), strict=True)
    return all(one.equal(other[first:end]) for one, other in pairs)


# ---------------------------------------------------------------------- slices


@pytest.mark.parametrize("cuts", [c for n in range(4) for c in combinations((1, 2, 3), n)])
def test_slices_do_not_change_a_bit(tower, encoder, cuts):
    ends = [*cuts, 4]
    given: Any = pixels(3, 7)
    for begin, end in zip([0, *cuts], ends, strict=True):
        part = EncodeSlice(5, 7, end - begin, end == 4, given)
        assert not encoder.run(step(part)).report.failed
        assert [layer.passed for layer in tower.layers] == [int(i < end) for i in range(4)]
        given = None
    assert same(rows_of(encoder, 5, 7), expected(tower, 3, 7))


@pytest.mark.parametrize("planned", [(), (0,), (2,), (0, 3), (1, 2, 3)])
def test_nor_do_slices_that_time_bounds(tower, encoder, planned):
    """A time that is up at once lets a run go on to the next point at which it can stop."""
    given: Any = pixels(3, 7)
    reached = 0
    for turn in range(40):
        seconds = None if turn in planned else 0.0
        report = timed(encoder, EncodeSlice(5, 7, int(seconds is None), False, given, seconds))
        given = None
        if seconds is None:
            continue
        assert report.layers[5] >= reached
        reached = report.layers[5]
        assert report.seconds > 0
        if reached == tower.parts:
            break
    assert turn >= 3
    assert [layer.passed for layer in tower.layers] == [1] * 4
    assert encoder.held_rows == 7
    encoder.run(step(EncodeSlice(5, 7, 0, True)))
    assert same(rows_of(encoder, 5, 7), expected(tower, 3, 7))


def test_with_time_enough_a_slice_is_the_whole_run(tower, encoder):
    report = timed(encoder, EncodeSlice(5, 7, 0, False, pixels(3, 7), 60.0))
    assert report.layers == {5: tower.parts}
    assert encoder.held_rows == 7


@pytest.mark.parametrize(("elapsed", "ends"), [(0.0, True), (100.0, True), (300.0, False)])
def test_a_slice_gets_what_the_tokens_of_its_step_leave(tower, encoder, elapsed, ends):
    """They were expected to take 100 s, and the slice may take 100 s, too."""
    part = EncodeSlice(5, 7, 0, False, pixels(3, 7), 100.0, 100.0)
    report = timed(encoder, part, elapsed)
    assert (report.layers == {5: tower.parts}) == ends


def test_a_failure_in_a_slice_that_time_bounds_is_told_with_the_last(tower, encoder):
    part = EncodeSlice(1, 3, 0, False, {"wrong": pixels(2, 3)["pixel_values"]}, 60.0)
    report = timed(encoder, part)
    assert (report.layers, report.failed) == ({1: tower.parts}, {})
    assert list(encoder.run(step(EncodeSlice(1, 3, 0, True))).report.failed) == [1]


def test_two_images_of_one_step_have_features_of_their_own(tower, encoder):
    encoder.run(step(whole(0, 3, seed=1), whole(1, 5, seed=2)))
    assert same(rows_of(encoder, 0, 3), expected(tower, 1, 3))
    assert same(rows_of(encoder, 1, 5), expected(tower, 2, 5))
    assert encoder.held_rows == 8


def test_the_last_slice_runs_whatever_is_left(tower, encoder):
    """A tower may pass more modules than it has layers, as it encodes parts one by one."""
    encoder.run(step(EncodeSlice(0, 3, 1, False, pixels(1, 3))))
    encoder.run(step(EncodeSlice(0, 3, 1, True)))
    assert same(rows_of(encoder, 0, 3), expected(tower, 1, 3))


def test_an_image_that_is_dropped_in_the_encoder_makes_way(tower, encoder):
    encoder.run(step(EncodeSlice(0, 3, 2, False, pixels(1, 3))))
    encoder.run(step(whole(1, 4, seed=2), dropped_images=[0]))
    assert same(rows_of(encoder, 1, 4), expected(tower, 2, 4))
    encoder.run(step(dropped_images=[1, 99]))
    assert encoder.held_rows == 0


def test_tensors_may_be_bfloat16_as_bits_and_read_only(tower, encoder):
    values = torch.randn(3, WIDTH).bfloat16()
    bits = values.view(torch.int16).numpy().view(np.uint16)
    bits.flags.writeable = False
    grid = np.frombuffer(np.array([[1, 3, 1]]).tobytes(), np.int64).reshape(1, 3)
    encoder.run(step(EncodeSlice(0, 3, 4, True, {"pixel_values": bits, "image_grid_thw": grid})))
    assert tower.seen[0]["pixel_values"].equal(values)
    assert tower.seen[0]["image_grid_thw"].tolist() == [[1, 3, 1]]


# ---------------------------------------------------------------------- rows of a step


def test_rows_stand_where_the_tokens_are(tower, encoder):
    encoder.run(step(whole(0, 6, seed=1), whole(1, 4, seed=2)))
    images = [
        ImageSpan(0, 1, 2, 0, 4),  # the end of the first image
        ImageSpan(2, 0, 1, 1, 0),
        ImageSpan(2, 3, 3, 1, 1),
    ]
    found = encoder.run(step(counts=(5, 7, 6), images=images)).rows
    assert found is not None
    assert found.indices.tolist() == [1, 2, 12, 15, 16, 17]
    one, two = expected(tower, 1, 6), expected(tower, 2, 4)
    for got, first, second in (
        (found.features, one.rows, two.rows),
        (found.deepstack[0], one.deepstack[0], two.deepstack[0]),
    ):
        assert got.equal(torch.cat([first[4:6], second]))


def test_a_step_without_images_has_no_rows(encoder):
    assert encoder.run(step(whole(0, 3), counts=(4,))).rows is None


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("sliced", [False, True])
def test_a_failure_is_of_one_image_and_told_to_all_steps_that_use_it(tower, encoder, sliced):
    encoder.run(step(whole(0, 3, seed=1)))
    tower.failure = ValueError("too wide\nin line 7")
    if sliced:
        assert not encoder.run(step(EncodeSlice(1, 3, 2, False, pixels(2, 3)))).report.failed
        found = encoder.run(step(EncodeSlice(1, 3, 2, True)))
    else:
        found = encoder.run(step(whole(1, 3, seed=2)))
    assert found.report.failed == {1: "too wide"}
    images = [ImageSpan(0, 0, 2, 0, 0), ImageSpan(1, 0, 2, 1, 0)]
    found = encoder.run(step(counts=(3, 3), images=images))
    assert found.report.failed == {1: "too wide"}
    assert found.rows is not None
    assert found.rows.indices.tolist() == [0, 1], "the other image's rows are there"
    tower.failure = None
    encoder.run(step(whole(2, 3, seed=2), dropped_images=[1]))
    assert same(rows_of(encoder, 2, 3), expected(tower, 2, 3))
    assert encoder.failure(1) is None


def test_a_failure_in_an_early_slice_is_told_with_the_last(tower, encoder):
    encoder.run(step(EncodeSlice(1, 3, 3, False, {"wrong": pixels(2, 3)["pixel_values"]})))
    found = encoder.run(step(EncodeSlice(1, 3, 1, True)))
    assert list(found.report.failed) == [1]


def test_another_number_of_rows_is_a_failure(tower, encoder):
    tower.extra = 1
    assert encoder.run(step(whole(0, 3))).report.failed == {
        0: "the encoder gave 4 rows for an image of 3"
    }


def test_lack_of_memory_is_a_failure_of_the_image(tower, encoder):
    tower.failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
    (cause,) = encoder.run(step(whole(0, 3))).report.failed.values()
    assert "ran out of memory" in cause


def test_no_shard_uses_features_that_another_lacks(tower):
    asked = []

    def smallest(value: int) -> int:
        asked.append(value)
        return 0

    shard: Any = SimpleNamespace(smallest=smallest, size=2, rank=0)
    encoder = ImageEncoder(tower, CPU, shard)
    encoder.run(step(EncodeSlice(0, 3, 2, False, pixels(2, 3))))
    assert asked == [], "asked once, when the image is encoded"
    found = encoder.run(step(EncodeSlice(0, 3, 2, True)))
    assert asked == [1]
    assert list(found.report.failed) == [0]
    assert encoder.held_rows == 0
    encoder.close()


# ---------------------------------------------------------------------- the runner


class Numbers(TinyTower):
    """Gives its pixels back: numbers that are seen in the place of token ids."""

    def encode(self, tensors: Any, num_rows: int) -> ImageFeatures:
        super().encode({"pixel_values": torch.zeros(num_rows, WIDTH)}, num_rows)
        return ImageFeatures(tensors["numbers"][:, None].float())


def sees(model: Any) -> list[Tensor]:
    """Have a fake model see images; returns the ids that it is given."""
    plain, given = model.forward, []

    def forward(input_ids: Tensor, positions: Tensor, attention: Any, images: Any = None) -> Tensor:
        given.append(input_ids)
        if images is not None:
            input_ids = input_ids.clone()
            input_ids[images.indices] = images.features[:, 0].long()
        return plain(input_ids, positions, attention)

    model.forward = forward
    return given


@pytest.fixture(params=[False, True])
def image_runner(request):
    """A runner of a model that takes images, its model's ids, and what closes it."""
    runner, model, _ = make_runner(like_a_device=request.param)
    encoder = ImageEncoder(Numbers(), CPU)
    runner.encode_with(encoder)
    yield runner, sees(model)
    encoder.close()


def numbers(*values: int) -> dict[str, Any]:
    return {"numbers": np.array(values, np.int64)}


def image_row(row: int, tokens: list[int], blocks: list[int], start: int, count: int) -> NewRow:
    images = (RowImage(((start, count),)),)
    return NewRow(
        row, row, tokens, len(tokens), blocks, SamplingParams(temperature=0.0), images=images
    )


def test_rows_of_images_are_computed_in_the_place_of_token_ids(image_runner):
    """Beside another prompt, in two chunks that part the image; then decodes go on."""
    runner, _ = image_runner
    seen = [5, 801, 802, 803, 6]
    new = [new_row(0, [9, 8, 7], [0]), image_row(2, [5, 1, 1, 1, 6], [3, 1], 1, 3)]
    first = step_of(
        (0, 0, 3, True),
        (2, 0, 3, False),
        new=new,
        encodes=[EncodeSlice(4, 3, 4, True, numbers(801, 802, 803))],
        images=[ImageSpan(1, 1, 2, 4, 0)],
    )
    tokens = [9, 8, 7, *run(runner, first).token_ids]
    assert tokens[-1] == next_token([9, 8, 7])
    second = step_of((0, 3, 1, True), (2, 3, 2, True), images=[ImageSpan(1, 0, 1, 4, 2)])
    result = run(runner, second)
    assert result.token_ids == [next_token(tokens), next_token(seen)]
    seen.append(result.token_ids[1])
    assert run(runner, step_of((2, 5, 1, True))).token_ids == [next_token(seen)]


def test_a_step_may_encode_and_compute_nothing(image_runner):
    runner, _ = image_runner
    part = EncodeSlice(4, 2, 2, False, numbers(801, 802))
    result = run(runner, Step(0, new=[image_row(0, [1, 1, 6], [0], 0, 2)], encodes=[part]))
    assert result.token_ids == result.logprobs == []
    assert not result.encodes.failed
    images = [ImageSpan(0, 0, 2, 4, 0)]
    last = step_of((0, 0, 3, True), encodes=[EncodeSlice(4, 2, 2, True)], images=images)
    assert run(runner, last).token_ids == [next_token([801, 802, 6])]


def test_slices_that_time_bounds_run_once_the_tokens_are_chosen(image_runner):
    runner, given = image_runner
    first = step_of((0, 0, 3, True), new=[new_row(0, [9, 8, 7], [0])])
    tokens = [9, 8, 7, *run(runner, first).token_ids]
    part = EncodeSlice(4, 2, 0, False, numbers(801, 802), 60.0)
    new = [image_row(1, [1, 1, 6], [1], 0, 2)]
    handle = runner.launch(step_of((0, 3, 1, True), new=new, encodes=[part]))
    assert len(given) == 2
    assert runner.sample(handle).wait().token_ids == [next_token(tokens)]
    images = [ImageSpan(0, 0, 2, 4, 0)]
    last = step_of((1, 0, 3, True), encodes=[EncodeSlice(4, 2, 0, True)], images=images)
    last.num_decodes = 0
    assert run(runner, last).token_ids == [next_token([801, 802, 6])]


def test_decodes_see_what_a_step_that_computes_nothing_has_changed(image_runner):
    """Though the inputs of decodes persist from step to step."""
    runner, _ = image_runner
    new = [new_row(0, [3, 4], [0, 1]), new_row(1, [7, 7], [2])]
    run(runner, step_of((0, 0, 2, True), (1, 0, 2, True), new=new))
    for position in (2, 3):
        run(runner, step_of((0, position, 1, True)))
    run(runner, Step(0, freed=[0, 1], new=[new_row(0, [7, 7, 9], [2])]))
    assert run(runner, step_of((0, 2, 1, True))).token_ids == [next_token([7, 7, 9])]


def test_a_failed_image_is_told_in_the_result(image_runner):
    runner, _ = image_runner
    part = EncodeSlice(4, 2, 4, True, {"wrong": np.zeros(2)})
    step = step_of(
        (0, 0, 3, True),
        (1, 0, 2, True),
        new=[image_row(0, [1, 1, 6], [0], 0, 2), new_row(1, [8, 9], [1])],
        encodes=[part],
        images=[ImageSpan(0, 0, 2, 4, 0)],
    )
    result = run(runner, step)
    assert list(result.encodes.failed) == [4]
    assert result.token_ids[1] == next_token([8, 9]), "others have their own"


def test_graphs_do_not_take_steps_with_rows_of_images(image_runner):
    runner, _ = image_runner
    taken = []

    class Graphs:
        def supports(self, batch: Any) -> bool:
            return True

        def run(self, batch: Any) -> Any:
            taken.append(batch)
            raise AssertionError("a graph looks up every token")

    runner.graphs = runner.mixed_graphs = Graphs()
    images = [ImageSpan(0, 0, 1, 4, 0)]
    encodes = [EncodeSlice(4, 1, 4, True, numbers(801))]
    new = [image_row(0, [1], [0], 0, 1)]
    step = step_of((0, 0, 1, True), new=new, encodes=encodes, images=images)
    step.num_decodes = 0
    assert run(runner, step).token_ids == [next_token([801])]
    with pytest.raises(AssertionError, match="looks up"):
        run(runner, step_of((0, 1, 1, True)))
    assert len(taken) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_ids_behind_the_vocabulary_can_be_looked_up(packed):
    upload = Uploader(CPU, packed=packed)
    table = InputBatch(2, 16, 4, upload, vocab_size=VOCAB)
    new = [image_row(0, [5, VOCAB, VOCAB + 7, 6], [0], 1, 2)]
    table.apply(Step(0, new=new))
    assert table.tokens[0, :4].tolist() == [5, 0, 0, 6]
    assert table.gather(torch.arange(4)).tolist() == [5, 0, 0, 6]
