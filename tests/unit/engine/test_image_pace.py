"""By how much images lengthen the steps that streams wait for, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.fake_images import image, image_request
from tests.unit.engine.test_image_encoding import TEXT, answer, encoded, encodes, run
from tests.unit.engine.test_scheduler import Harness, limits, request
from tgi_cli.config import EncoderLimits
from tgi_cli.engine import step_pace
from tgi_cli.engine.messages import FinishReason
from tgi_cli.engine.step import Step

CAT = image(b"cat", (6, 10))
SHARE = 0.85
"""Part of a decode's time that images get here."""
DECODE, IMAGES = 0.06, pytest.approx(0.06 * SHARE)


@pytest.fixture(autouse=True)
def share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_pace, "IMAGE_SHARE", SHARE)


def encoder(layers: int = 4, row_cost: float = 4.0, **more: Any) -> EncoderLimits:
    """A token takes 10 ms and a decode 60: beside one, images get 51, as 5 tokens take.

    Where slices are bounded by time, chunks are planned for 3.
    """
    known = {"token_seconds": 0.01, "step_seconds": DECODE}
    return EncoderLimits(layers=layers, row_cost=row_cost, cache_rows=32, **(known | more))


def harness(interrupts: bool, **more: Any) -> Harness:
    """Steps of 16 prompt tokens."""
    known = encoder(interrupts=interrupts, **more)
    return Harness(limits(max_batch_prefill_tokens=16, encoder=known))


def beside_a_stream(found: Harness, *sent: Any) -> list[Step]:
    """The steps of requests beside a stream, which gets a token in each."""
    found.add(request(100, [1, 2], 200))
    found.step()
    begin = len(found.worker.steps)
    for each in sent:
        found.add(each)
    while any(each.request_id not in found.finished for each in sent):
        before = len(found.tokens[100])
        found.step()
        assert len(found.tokens[100]) == before + 1
    for each in sent:
        if found.finished[each.request_id].reason is not FinishReason.ERROR:
            assert found.tokens[each.request_id] == answer(each)
    return found.worker.steps[begin:]


# ---------------------------------------------------------------------- slices


def test_slices_beside_a_stream_are_nearly_as_long_as_its_decode() -> None:
    """A layer costs 2.5 tokens: two of them are five."""
    found = harness(interrupts=False, layers=16)
    steps = beside_a_stream(found, image_request(1, TEXT[:20], 2, image(b"cat", (0, 10))))
    assert [encodes(step) for step in steps if step.encodes] == [
        *[[(0, 2, False)]] * 7,
        [(0, 2, True)],
    ]
    assert [step.num_prefill_tokens for step in steps[8:10]] == [5, 5], "rows of the image"
    assert encoded(found) == 1


def test_where_a_run_can_be_interrupted_time_bounds_its_slices() -> None:
    """A layer takes 0.1 s, two slices: the first one is beside no token of the prompt."""
    found = harness(interrupts=True)
    found.worker.layer_seconds = 0.1
    steps = beside_a_stream(found, image_request(1, TEXT[:20], 2, image(b"cat", (0, 10))))
    slices = [part for step in steps for part in step.encodes]
    assert [(part.layers, part.last, part.seconds) for part in slices] == [
        *[(0, False, IMAGES)] * 8,
        (0, True, None),
    ]
    assert [part.tensors is not None for part in slices] == [True, *[False] * 8]
    last = next(step for step in steps if step.encodes and step.encodes[-1].last)
    assert last.num_prefill_tokens == 3, "with the first tokens of the image"
    assert encoded(found) == 1


def test_text_before_an_image_takes_its_part_of_the_time() -> None:
    found = harness(interrupts=True)
    steps = beside_a_stream(found, image_request(1, TEXT[:20], 2, CAT))
    assert [step.num_prefill_tokens for step in steps[:3]] == [3, 3, 0]
    found = harness(interrupts=True)
    steps = beside_a_stream(found, image_request(1, TEXT[:20], 2, image(b"cat", (4, 10))))
    assert [step.num_prefill_tokens for step in steps[:2]] == [3, 1]
    assert steps[1].encodes[0].seconds == pytest.approx(DECODE * SHARE * 2 / 3)


def test_prompts_without_images_have_the_whole_budget() -> None:
    found = harness(interrupts=True)
    text = request(2, range(300, 340), 2)
    steps = beside_a_stream(found, image_request(1, TEXT[:20], 2, image(b"cat", (0, 10))), text)
    assert [step.counts for step in steps[:2]] == [[1, 12], [1, 12]], "and three are the image's"
    assert all(step.encodes for step in steps[:2])


def test_slices_know_what_the_tokens_of_their_step_are_expected_to_take() -> None:
    """A decode 60 ms, and a token of a prompt 10: whatever is planned after the slice."""
    found = harness(interrupts=True)
    found.worker.layer_seconds = 0.2
    steps = beside_a_stream(
        found,
        image_request(1, TEXT[:20], 2, image(b"cat", (0, 10))),
        request(2, range(300, 340), 2),
    )
    slices = [(step, part) for step in steps for part in step.encodes if not part.last]
    assert {step.num_prefill_tokens > 0 for step, _ in slices} == {True, False}
    for step, part in slices:
        expected = DECODE + 0.01 * step.num_prefill_tokens
        assert part.rest_seconds == pytest.approx(expected)


def test_without_streams_slices_fill_the_budget() -> None:
    found = harness(interrupts=True, layers=16)
    steps = run(found, image_request(1, TEXT[:20], 2, CAT))
    assert [encodes(step) for step in steps if step.encodes] == [
        [(0, 4, False)],
        [(0, 6, False)],
        [(0, 6, True)],
    ]
    assert not any(part.seconds for step in steps for part in step.encodes)


def test_a_text_does_not_wait_until_an_image_is_encoded() -> None:
    found = harness(interrupts=True, layers=16)
    found.add(image_request(1, TEXT[:20], 2, image(b"cat", (0, 10))))
    found.step()
    found.add(request(2, range(300, 304), 1))
    while 2 not in found.finished:
        found.step()
    assert encoded(found) == 0
    found.run()
    assert found.finished[1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens", [2, 4, 7])
def test_when_the_stream_ends_the_rest_of_the_image_is_run_at_once(tokens: int) -> None:
    found = harness(interrupts=True)
    found.worker.layer_seconds = 0.1
    found.add(request(100, [1, 2], tokens))
    found.step()
    sent = image_request(1, TEXT[:20], 2, image(b"cat", (0, 10)))
    found.add(sent)
    found.run()
    assert found.tokens[1] == answer(sent)
    slices = [part for step in found.worker.steps for part in step.encodes]
    assert [part.seconds is not None for part in slices] == sorted(
        (part.seconds is not None for part in slices), reverse=True
    )
    assert slices[-1].last
    assert encoded(found) == 1


def test_several_images_take_turns_in_one_step_after_the_other() -> None:
    found = harness(interrupts=True)
    found.worker.layer_seconds = 0.05
    sent = [image_request(i, TEXT[:20], 2, image(bytes([i]), (0, 10))) for i in (1, 2)]
    steps = beside_a_stream(found, *sent)
    assert all(sum(part.seconds is not None for part in step.encodes) <= 1 for step in steps)
    keys = [part.key for step in steps for part in step.encodes]
    assert keys == sorted(keys), "an image is in the encoder until it is encoded"
    assert encoded(found) == 2


def test_what_must_not_be_parted_is_computed_beside_a_stream_as_well() -> None:
    found = harness(interrupts=True)
    found.worker.layer_seconds = 0.01
    cat = image(b"cat", (3, 12), bidirectional=True)
    steps = beside_a_stream(found, image_request(1, TEXT[:20], 2, cat))
    assert 12 in [step.num_prefill_tokens for step in steps]


def test_an_image_that_cannot_be_encoded_ends_its_request_alone() -> None:
    found = harness(interrupts=True)
    found.worker.layer_seconds = 0.1
    found.worker.unreadable = {b"bad"}
    bad = image_request(1, TEXT[:20], 2, image(b"bad", (0, 10)))
    beside_a_stream(found, bad, image_request(2, TEXT[:20], 2, image(b"cat", (0, 10))))
    assert found.finished[1].error == "the image is unreadable"


def test_an_image_that_is_given_up_makes_room() -> None:
    """Before its first layer has run."""
    found = harness(interrupts=True)
    found.worker.layer_seconds = 9.0
    found.add(request(100, [1, 2], 200))
    found.step()
    found.add(image_request(1, TEXT[:20], 2, image(b"cat", (0, 10))))
    found.step()
    assert found.batch.cancel(1) is not None
    found.worker.layer_seconds = 0.01
    found.add(sent := image_request(2, TEXT[:20], 2, image(b"dog", (0, 10))))
    while 2 not in found.finished:
        found.step()
    assert found.tokens[2] == answer(sent)
    assert [key for step in found.worker.steps for key in step.dropped_images] == [0]
