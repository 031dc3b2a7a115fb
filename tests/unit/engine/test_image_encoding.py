"""What steps encode, how far they compute prompts with images, and what becomes of failures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.engine.fake_grammar import EOS, FakeCompiler, constrained, slots
from tests.unit.engine.fake_images import IMAGE_ID, image, image_request, seen
from tests.unit.engine.fake_speculator import FakeSpeculator
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_scheduler import Harness, limits, request
from tgi_cli.config import EncoderLimits
from tgi_cli.engine.config import Batching, CapacityPolicy, SchedulerConfig
from tgi_cli.engine.messages import FinishReason, GenerationRequest
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.step import Step

TEXT = list(range(100, 140))


def bounds(
    layers: int = 4, row_cost: float = 1.0, cache_rows: int = 32, **changes: Any
) -> SchedulerConfig:
    """Steps of 16 prompt tokens, and blocks of 4."""
    encoder = EncoderLimits(layers=layers, row_cost=row_cost, cache_rows=cache_rows)
    return limits(**{"max_batch_prefill_tokens": 16, "encoder": encoder, **changes})


def answer(sent: GenerationRequest, whole: bool = False) -> list[int]:
    return continuation(seen(sent, whole), sent.max_new_tokens, 1000)


def encodes(step: Step) -> list[tuple[int, int, bool]]:
    return [(part.key, part.layers, part.last) for part in step.encodes]


def run(harness: Harness, *sent: GenerationRequest) -> list[Step]:
    """The steps of some requests, until all have ended; each must have its answer."""
    begin = len(harness.worker.steps)
    for each in sent:
        harness.add(each)
    harness.run()
    for each in sent:
        assert harness.tokens[each.request_id] == answer(each, harness.worker.whole_prompts)
    return harness.worker.steps[begin:]


def encoded(harness: Harness) -> int:
    return harness.scheduler.load().encoded_images


# ---------------------------------------------------------------------- the budget


def test_an_image_is_encoded_in_slices_and_its_tokens_follow_behind_the_last() -> None:
    """10 rows at 4 tokens each, in 4 layers: a layer costs 10 tokens."""
    harness = Harness(bounds(row_cost=4.0))
    steps = run(harness, image_request(1, TEXT[:20], 2, image(b"cat", (6, 10))))
    assert [encodes(step) for step in steps] == [
        [(0, 1, False)],
        [(0, 1, False)],
        [(0, 1, False)],
        [(0, 1, True)],
        [],
        [],
    ]
    assert [step.counts for step in steps] == [[6], [], [], [6], [8], [1]]
    assert [len(step.images) for step in steps] == [0, 0, 0, 1, 1, 0]


def test_streams_go_on_beside_an_image_and_no_step_does_more_than_it_may() -> None:
    harness = Harness(bounds(layers=8, row_cost=8.0))
    for i in range(3):
        harness.add(request(i, [i, i + 1], 60))
    harness.step()
    sent = image_request(9, TEXT[:30], 3, image(b"cat", (2, 12)), image(b"dog", (16, 4)))
    begin = len(harness.worker.steps)
    harness.add(sent)
    while 9 not in harness.finished:
        harness.step()
    assert harness.tokens[9] == answer(sent)
    for step in harness.worker.steps[begin:]:
        assert step.num_decodes >= 3, "a stream has waited"
        cost = sum(part.rows * 8.0 / 8 * part.layers for part in step.encodes)
        assert step.num_prefill_tokens + math.ceil(cost) <= 13
    assert encoded(harness) == 2


def test_a_layer_that_exceeds_the_budget_leaves_half_of_it_to_a_text() -> None:
    harness = Harness(bounds(layers=2, row_cost=10.0))
    first = image_request(1, TEXT[:12], 2, image(b"cat", (2, 8)))
    second = request(2, range(300, 320), 2)
    steps = run(harness, first, second)
    slices = [(encodes(step), step.counts) for step in steps if step.encodes]
    assert slices == [([(0, 1, False)], [6]), ([(0, 1, True)], [1])]


def test_small_images_are_encoded_and_computed_in_one_step() -> None:
    harness = Harness(bounds(layers=4, row_cost=0.5))
    sent = image_request(1, TEXT[:12], 2, image(b"cat", (1, 3)), image(b"dog", (5, 2), (8, 1)))
    steps = run(harness, sent)
    assert encodes(steps[0]) == [(0, 4, True), (1, 4, True)]
    assert steps[0].counts == [12]
    assert [(span.offset, span.count, span.key, span.first) for span in steps[0].images] == [
        (1, 3, 0, 0),
        (5, 2, 1, 0),
        (8, 1, 1, 2),
    ]
    assert len(steps) == 2


def test_one_image_is_in_the_encoder_and_whoever_needs_it_finishes_what_is_begun() -> None:
    """The request of lower priority begins: the other one's layers do not fit behind its text."""
    harness = Harness(bounds(layers=4, row_cost=8.0))
    high = image_request(1, TEXT[:30], 2, image(b"dog", (20, 8)), priority=1)
    low = image_request(2, TEXT[:12], 2, image(b"cat", (0, 4)))
    steps = run(harness, high, low)
    slices = [part for step in steps for part in encodes(step)]
    dog, cat = 0, 1
    assert slices == [
        (cat, 1, False),
        (cat, 2, False),
        (cat, 1, True),
        *[(dog, 1, False)] * 3,
        (dog, 1, True),
    ]


@pytest.mark.parametrize("batching", [Batching.INFLIGHT, Batching.STATIC])
def test_every_batching_policy_encodes(batching: Batching) -> None:
    harness = Harness(bounds(row_cost=4.0, batching=batching))
    sent = [image_request(i, TEXT[:14], 4, image(bytes([i]), (1, 7))) for i in range(4)]
    run(harness, *sent)
    assert encoded(harness) == 4


# ---------------------------------------------------------------------- reuse


def test_an_image_in_a_second_turn_is_neither_encoded_nor_computed() -> None:
    harness = Harness(bounds())
    first = image_request(1, TEXT[:20], 4, image(b"cat", (6, 10)))
    run(harness, first)
    turn = [*first.prompt_ids, *harness.tokens[1], *TEXT[:9]]
    second = image_request(2, turn, 4, *first.images)
    steps = run(harness, second)
    assert not any(step.encodes or step.images for step in steps)
    assert steps[0].starts == [20]
    assert encoded(harness) == 1


def test_the_same_text_with_another_image_shares_nothing_behind_its_beginning() -> None:
    harness = Harness(bounds())
    run(harness, image_request(1, TEXT[:20], 2, image(b"cat", (6, 10))))
    steps = run(harness, image_request(2, TEXT[:20], 2, image(b"dog", (6, 10))))
    assert steps[0].starts == [4], "the block before the image's first"
    assert encoded(harness) == 2


def test_a_hit_within_a_span_computes_the_rest_of_it() -> None:
    """The blocks of the image's end are taken by others."""
    harness = Harness(bounds(num_blocks=8, max_total_tokens=32))
    sent = image_request(1, TEXT[:20], 1, image(b"cat", (2, 16)))
    run(harness, sent)
    run(harness, request(2, range(300, 318), 2))  # takes the free blocks, and the last cached ones
    steps = run(harness, image_request(3, TEXT[:20], 1, image(b"cat", (2, 16))))
    assert 4 <= steps[0].starts[0] <= 12
    assert steps[0].images[0].first == steps[0].starts[0] - 2
    assert encoded(harness) == 1, "its features were still there"


def test_the_same_image_twice_is_encoded_once() -> None:
    harness = Harness(bounds())
    run(harness, image_request(1, TEXT[:24], 2, image(b"cat", (2, 8)), image(b"cat", (12, 8))))
    assert encoded(harness) == 1
    assert harness.scheduler.load().reused_images == 1


def test_another_salt_sees_no_features_of_the_first() -> None:
    harness = Harness(bounds())
    cat = image(b"cat", (2, 8))
    run(harness, image_request(1, TEXT[:12], 2, cat, cache_salt=b"one"))
    run(harness, image_request(2, TEXT[:12], 2, cat, cache_salt=b"two"))
    assert encoded(harness) == 2


def test_features_stay_until_others_need_the_room() -> None:
    harness = Harness(bounds(cache_rows=18))
    for request_id, pixels in enumerate([b"cat", b"dog", b"cat", b"ox", b"cat", b"dog"]):
        # Each begins with other text, so that no block is found.
        text = [200 + 10 * request_id, *TEXT[:11]]
        run(harness, image_request(request_id, text, 1, image(pixels, (2, 8))))
    dropped = [key for step in harness.worker.steps for key in step.dropped_images]
    assert encoded(harness) == 4
    assert dropped == [1, 2], "the dog for the ox, and the ox for the dog"


def test_an_image_waits_for_room_that_running_requests_hold() -> None:
    """Two images do not fit: one request computes its own first, though both run."""
    harness = Harness(bounds(cache_rows=10, row_cost=0.1, max_batch_prefill_tokens=64))
    sent = [image_request(i, TEXT[:30], 2, image(bytes([i]), (2, 8))) for i in range(3)]
    steps = run(harness, *sent)
    assert steps[0].counts == [30, 2, 2]
    assert encoded(harness) == 3
    assert harness.batch.resources.images is not None
    assert harness.batch.resources.images.cache.num_used == 0


# ---------------------------------------------------------------------- what must not be parted


def test_a_span_whose_rows_see_each_other_is_never_parted() -> None:
    harness = Harness(bounds(row_cost=0.1))
    sent = image_request(1, TEXT[:40], 2, image(b"cat", (10, 12), (25, 9), bidirectional=True))
    steps = run(harness, sent)
    assert [step.counts for step in steps] == [[10], [15], [15], [1]]


def test_such_a_span_may_exceed_what_decodes_leave_in_a_step_of_its_own() -> None:
    harness = Harness(bounds(row_cost=0.1))
    for i in range(6):
        harness.add(request(i, [i], 90))
    while harness.batch.waiting:
        harness.step()
    harness.step()
    sent = image_request(9, TEXT[:20], 2, image(b"cat", (2, 16), bidirectional=True))
    harness.add(sent)
    begin = len(harness.worker.steps)
    while 9 not in harness.finished:
        harness.step()
    assert harness.tokens[9] == answer(sent)
    counts = [step.counts[6:] for step in harness.worker.steps[begin:]]
    assert counts[:3] == [[2], [16], [2]]


def test_a_hit_within_such_a_span_computes_the_rest_at_once() -> None:
    harness = Harness(bounds(num_blocks=8, max_total_tokens=32, row_cost=0.1))
    sent = image_request(1, TEXT[:20], 1, image(b"cat", (2, 16), bidirectional=True))
    run(harness, sent)
    run(harness, request(2, range(300, 318), 2))
    steps = run(harness, image_request(3, TEXT[:20], 1, *sent.images))
    assert 0 < steps[0].starts[0] < 18 <= steps[0].starts[0] + steps[0].counts[0]


@pytest.mark.parametrize("text", [[7], [7, 8, 9, 10, 11, 12]])
def test_prompts_that_all_see_themselves_are_one_chunk(text: list[int]) -> None:
    harness = Harness(bounds(whole_prompts=True, row_cost=0.1))
    sent = image_request(1, [*TEXT[:10], *text], 3, image(b"cat", (0, 6)))
    steps = run(harness, sent)
    assert [step.counts[0] for step in steps if step.counts] == [len(sent.prompt_ids), 1, 1]
    steps = run(harness, image_request(2, sent.prompt_ids, 3, *sent.images))
    assert steps[0].starts[0] > 0, "an equal prompt finds its blocks"
    steps = run(harness, image_request(3, [*sent.prompt_ids[:-1], 99], 3, *sent.images))
    assert steps[0].starts == [0], "another does not"
    steps = run(harness, request(4, range(500, 516), 2))
    assert steps[0].counts == [16], "nor is text parted"


# ---------------------------------------------------------------------- ends of prompts, forks


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_prompt_may_end_with_an_image(rows: int, bidirectional: bool) -> None:
    """Its last token is no decode, even if it is all that is left."""
    harness = Harness(bounds(max_batch_prefill_tokens=9, row_cost=0.1))
    cat = image(b"cat", (8, rows), bidirectional=bidirectional)
    steps = run(harness, image_request(1, TEXT[: 8 + rows], 3, cat))
    assert all(step.num_decodes == 0 for step in steps if step.images)
    again = run(harness, image_request(2, TEXT[: 8 + rows], 3, cat))
    assert again[0].images, "the row that chooses the first token is computed"
    assert encoded(harness) == 1


@pytest.mark.parametrize("end", [0, 5])
def test_forks_share_the_images_of_a_prompt(end: int) -> None:
    harness = Harness(bounds(row_cost=0.1))
    sent = image_request(1, TEXT[: 12 + end], 6, image(b"cat", (2, 10)))
    forks = [sent.fork(i, i) for i in (2, 3)]
    steps = run(harness, sent, *forks)
    assert encoded(harness) == 1
    computed = sum(step.num_tokens for step in steps)
    assert computed == len(sent.prompt_ids) + 2 + 3 * 5, "of forks, the prompt's last token alone"


def test_a_fork_of_other_images_is_refused() -> None:
    harness = Harness(bounds())
    harness.add(image_request(1, TEXT[:12], 6, image(b"cat", (2, 8))))
    other = image_request(2, TEXT[:12], 6, image(b"dog", (2, 8)), fork_of=1)
    refused = harness.scheduler.add(other)
    assert refused is not None
    assert "another prompt" in refused.error


# ---------------------------------------------------------------------- preemption


@pytest.mark.parametrize("cache_rows", [12, 60])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_preemption_within_and_behind_a_span_changes_no_token(
    cache_rows: int, bidirectional: bool
) -> None:
    harness = Harness(
        bounds(
            cache_rows=cache_rows,
            num_blocks=16,
            max_total_tokens=60,
            row_cost=0.3,
            max_batch_prefill_tokens=12,
        )
    )
    sent = [
        image_request(
            i, [i, *TEXT[:21]], 30, image(bytes([i]), (5, 12), bidirectional=bidirectional)
        )
        for i in range(4)
    ]
    run(harness, *sent)
    assert harness.batch.preemptions > 0
    assert encoded(harness) >= 4


def test_an_image_that_is_given_up_within_the_encoder_makes_room_for_others() -> None:
    harness = Harness(bounds(row_cost=8.0))
    harness.add(image_request(1, TEXT[:12], 6, image(b"cat", (0, 8))))
    harness.step()
    ended = harness.batch.cancel(1)
    assert ended is not None
    steps = run(harness, image_request(2, TEXT[:12], 2, image(b"dog", (0, 8))))
    assert steps[0].dropped_images == [0]
    assert encodes(steps[0]) == [(1, 1, False)]
    assert not harness.worker.begun


# ---------------------------------------------------------------------- failures


def test_an_image_that_cannot_be_encoded_ends_its_request_alone() -> None:
    harness = Harness(bounds(row_cost=4.0))
    harness.worker.unreadable = {b"bad"}
    harness.add(image_request(1, TEXT[:20], 6, image(b"bad", (4, 8))))
    good = image_request(2, TEXT[:20], 6, image(b"cat", (4, 8)))
    harness.add(good)
    harness.run()
    assert harness.finished[1].reason is FinishReason.ERROR
    assert harness.finished[1].error == "the image is unreadable"
    assert harness.tokens[1] == []
    assert harness.tokens[2] == answer(good)
    harness.worker.unreadable = set()
    run(harness, image_request(3, TEXT[:20], 6, image(b"bad", (4, 8))))


def test_a_failure_ends_all_that_wait_for_the_image_and_forks_with_its_blocks() -> None:
    """Two steps are in flight: the fork has begun when the failure becomes known."""
    harness = Harness(bounds(row_cost=0.1, max_batch_prefill_tokens=64))
    harness.worker.unreadable = {b"bad"}
    sent = image_request(1, TEXT[:20], 6, image(b"bad", (4, 8)))
    for each in (sent, sent.fork(2, 1), request(3, range(10), 6)):
        harness.add(each)
    pending = []
    for _ in range(2):
        step = harness.scheduler.schedule()
        assert step is not None
        pending.append(harness.worker.sample(harness.worker.launch(step)))
    assert len(harness.batch.running) == 3
    for result in pending:
        harness.take(harness.scheduler.update(result.wait()))
    assert {i: f.reason for i, f in harness.finished.items()} == dict.fromkeys(
        (1, 2), FinishReason.ERROR
    )
    assert not harness.tokens[1] + harness.tokens[2]
    harness.run()
    assert harness.tokens[3] == continuation(range(10), 6, 1000)
    harness.worker.unreadable = set()
    steps = run(harness, image_request(4, TEXT[:20], 2, image(b"bad", (4, 8))))
    assert steps[0].starts == [0], "no block of the failed request was kept"


def test_a_step_that_breaks_ends_the_requests_whose_images_it_encodes() -> None:
    harness = Harness(bounds(row_cost=5.0))
    harness.add(image_request(1, TEXT[:12], 6, image(b"cat", (0, 8))))
    harness.add(image_request(2, TEXT[:12], 6, image(b"cat", (0, 8))))
    harness.step()
    step = harness.scheduler.schedule()
    assert step is not None
    assert not step.rows
    harness.worker.fail_when = lambda _: RuntimeError("broke")
    with pytest.raises(RuntimeError):
        harness.worker.launch(step)
    harness.worker.fail_when = lambda _: None
    harness.take(harness.scheduler.fail("broke"))
    assert {i: f.error for i, f in harness.finished.items()} == {1: "broke", 2: "broke"}
    steps = run(harness, image_request(3, TEXT[:12], 2, image(b"cat", (0, 8))))
    assert steps[0].dropped_images == [0]


def test_a_model_without_an_encoder_refuses_images() -> None:
    harness = Harness(limits())
    refused = harness.scheduler.add(image_request(1, TEXT[:12], 6, image(b"cat", (0, 8))))
    assert refused is not None
    assert refused.reason is FinishReason.ERROR
    assert "takes no images" in refused.error


# ---------------------------------------------------------------------- what else requests have


def test_drafts_never_are_tokens_that_stand_for_images() -> None:
    class Copies(FakeSpeculator):
        def propose(self, sequences: Any, waiting: bool, others: int = 0) -> list[list[int]]:
            return [[5, IMAGE_ID, 6] for _ in sequences]

    sent = image_request(1, TEXT[:20], 8, image(b"cat", (4, 8)))
    config = bounds()
    worker = FakeWorker.of(config)
    worker.seen[1] = seen(sent)
    scheduler = Scheduler(config, speculator=Copies("wrong", lambda key: []))
    assert scheduler.add(sent) is None
    got: list[int] = []
    while (step := scheduler.schedule()) is not None:
        got += scheduler.update(worker.sample(worker.launch(step)).wait()).token_ids
    assert got == answer(sent)
    assert worker.drafted > 0


def test_a_grammar_constrains_what_follows_an_image() -> None:
    grammar = slots(range(100, 120), [11], [12], [13], range(30), repeat=True)
    stops = frozenset({EOS})
    cat = image(b"cat", (4, 8))
    sent = image_request(1, TEXT[:20], 12, cat, grammar=grammar, stop_token_ids=stops)
    config = bounds()
    worker = FakeWorker.of(config)
    worker.seen[1] = seen(sent)
    scheduler = Scheduler(config, compiler=FakeCompiler())
    assert scheduler.add(sent) is None
    scheduler.batch.collect_grammars()
    got: list[int] = []
    while (step := scheduler.schedule()) is not None:
        handle = worker.launch(step)
        grammars = scheduler.batch.grammars
        masks = grammars.masks() if grammars.needs_mask else None
        got += scheduler.update(worker.sample(handle, masks).wait()).token_ids
    assert got == constrained(seen(sent), 12, grammar)


def test_guaranteed_capacity_holds_with_images() -> None:
    harness = Harness(
        bounds(num_blocks=16, capacity_policy=CapacityPolicy.GUARANTEED_NO_EVICT, row_cost=2.0)
    )
    run(harness, *(image_request(i, TEXT[:20], 8, image(bytes([i]), (3, 9))) for i in range(4)))
    assert harness.batch.preemptions == 0


def test_states_are_those_of_the_images_too() -> None:
    harness = Harness(bounds(num_state_slots=20, row_cost=2.0))
    cat = image(b"cat", (3, 18))
    run(harness, image_request(1, TEXT[:30], 8, cat))
    steps = run(harness, image_request(2, TEXT[:30], 8, cat))
    assert not steps[0].encodes
    assert steps[0].starts[0] == 28
