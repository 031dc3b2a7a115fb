"""Images in externally driven steps, beside the scheduler's own."""

from __future__ import annotations

import pytest

from tests.unit.engine.fake_images import image, image_request, seen
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_external_steps import engine, fault_of
from tests.unit.engine.test_image_encoding import answer, bounds
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import AdvanceFault, FinishReason, GenerationRequest

TEXT = list(range(100, 140))
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def sees(config: SchedulerConfig, *sent: GenerationRequest) -> FakeWorker:
    worker = FakeWorker.of(config)
    worker.seen = {each.request_id: seen(each) for each in sent}
    return worker


@DEPTHS
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_call_encodes_the_images_of_its_prompts(depth: int, bidirectional: bool) -> None:
    """A layer costs 9 of the 16 tokens of a step: an image takes several steps."""
    config = bounds(row_cost=4.0)
    images = [image(pixels, (3, 9), bidirectional=bidirectional) for pixels in (b"cat", b"dog")]
    sent = [image_request(i, TEXT[:20], 5, images[i % 2]) for i in range(3)]
    worker = sees(config, *sent)
    with engine(config, depth, worker) as (caller, client):
        caller.advance(*sent)
        caller.run_out(0, 1, 2)
        assert client.core.metrics.load.encoded_images == 2
    for each in sent:
        assert caller.tokens[each.request_id] == answer(each)


@DEPTHS
def test_a_prompt_is_computed_in_calls_that_end_within_an_image(depth: int) -> None:
    config = bounds(row_cost=0.1)
    sent = image_request(1, TEXT[:30], 4, image(b"cat", (3, 20)))
    with engine(config, depth, sees(config, sent)) as (caller, _):
        caller.advance(sent, new_targets=(10,))
        assert caller.pending == {1: 20}
        caller.advance(running=(1,), prefill_budget=8)
        assert caller.pending == {1: 12}
        caller.run_out(1)
    assert caller.tokens[1] == answer(sent)


def test_a_call_that_would_end_within_a_whole_span_ends_behind_it() -> None:
    config = bounds(row_cost=0.1)
    sent = image_request(1, TEXT[:30], 4, image(b"cat", (3, 12), bidirectional=True))
    with engine(config, 0, sees(config, sent)) as (caller, _):
        caller.advance(sent, new_targets=(10,))
        assert caller.pending == {1: 15}
        caller.run_out(1)
    assert caller.tokens[1] == answer(sent)


@DEPTHS
def test_a_paused_sequence_holds_no_room_that_others_need(depth: int) -> None:
    """There is room for one image: a call that ended within one does not keep it."""
    config = bounds(row_cost=0.1, cache_rows=12)
    driven = image_request(1, TEXT[:30], 4, image(b"cat", (3, 12)))
    own = image_request(2, TEXT[:30], 4, image(b"dog", (3, 12)))
    with engine(config, depth, sees(config, driven, own)) as (caller, client):
        caller.advance(driven, new_targets=(10,))
        client.core.inbox.put(own)
        client.read_until_finished(2)
        caller.run_out(1)
        assert client.core.metrics.load.encoded_images == 3, "the first one once more"
    assert caller.tokens[1] == answer(driven)
    assert client.tokens[2] == answer(own)


@DEPTHS
def test_both_schedulers_share_the_encoder_and_what_it_gave(depth: int) -> None:
    config = bounds(row_cost=6.0, cache_rows=12)
    driven = [
        image_request(i, [i, *TEXT[:20]], 4, image(bytes([i % 2]), (3, 12))) for i in range(3)
    ]
    own = [
        image_request(i, [i, *TEXT[:20]], 4, image(bytes([i % 2]), (3, 12))) for i in range(10, 13)
    ]
    with engine(config, depth, sees(config, *driven, *own)) as (caller, client):
        for each in own:
            client.core.inbox.put(each)
        caller.advance(*driven)
        caller.run_out(0, 1, 2)
        client.read_until_finished(10, 11, 12)
    for each in driven:
        assert caller.tokens[each.request_id] == answer(each)
    for each in own:
        assert client.tokens[each.request_id] == answer(each)


@DEPTHS
def test_an_image_that_cannot_be_encoded_ends_its_sequence_alone(depth: int) -> None:
    config = bounds(row_cost=0.1)
    bad = image_request(1, TEXT[:20], 4, image(b"bad", (3, 9)))
    good = image_request(2, TEXT[:20], 4, image(b"cat", (3, 9)))
    worker = sees(config, bad, good)
    worker.unreadable = {b"bad"}
    with engine(config, depth, worker) as (caller, _):
        caller.advance(bad, good)
        assert caller.ended == {1: FinishReason.ERROR}
        caller.run_out(2)
    assert caller.tokens == {2: continuation(seen(good), 4, 1000)}


def test_images_of_a_model_that_takes_none_are_refused() -> None:
    config = bounds(encoder=None)
    with engine(config) as (caller, _):
        error = fault_of(caller.send(image_request(1, TEXT[:20], 4, image(b"cat", (3, 9)))))
    assert error.fault is AdvanceFault.INVALID
    assert "takes no images" in error.cause
