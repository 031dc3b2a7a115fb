"""How long chunks of prompts and slices of images may be beside decodes, as steps have shown it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.fake_worker import continuation
from tests.unit.engine.test_scheduler import Harness, limits, request
from tgi_cli.config import EncoderLimits
from tgi_cli.engine.image_slices import EncodeSlice
from tgi_cli.engine.step import Step
from tgi_cli.engine.step_pace import (
    CHUNK_SHARE,
    IMAGE_SHARE,
    LEAST_CHUNK,
    LEAST_IMAGE_SECONDS,
    LEAST_SLICE_SECONDS,
    PROBE_STEPS,
    ChunkCosts,
    StepPace,
)


def pace(delay: int = 0, token_seconds: float = 0.001, **encoder: Any) -> StepPace:
    """A decode takes 50 ms, if there is an encoder to have measured it."""
    known = None
    if encoder:
        values = {"layers": 4, "row_cost": 4.0, "cache_rows": 32, "step_seconds": 0.05}
        values |= {"token_seconds": token_seconds, **encoder}
        known = EncoderLimits(**values)
    return StepPace(limits(max_prefill_delay=delay, token_seconds=token_seconds, encoder=known))


def decode(**more: Any) -> Step:
    return Step(0, rows=[0], counts=[1], num_decodes=1, **more)


def chunk(tokens: int) -> Step:
    """Beside a decode."""
    return Step(0, rows=[0, 1], counts=[1, tokens], num_decodes=1)


def slice_of(
    seconds: float | None, begins: bool = False, rest_seconds: float = 0.05
) -> EncodeSlice:
    return EncodeSlice(0, 10, 0, False, {} if begins else None, seconds, rest_seconds)


# ---------------------------------------------------------------------- prompts


def test_without_a_limit_prompts_have_the_whole_budget() -> None:
    assert pace(delay=0).prefill_tokens(1000) == 1000
    assert pace(delay=100, token_seconds=0.0).prefill_tokens(1000) == 1000, "nothing is known"


def test_a_chunk_takes_as_long_as_prompts_may_delay_tokens() -> None:
    found = pace(delay=100)
    assert found.prefill_tokens(1000) == 100
    assert found.prefill_tokens(70) == 70


def test_prompts_have_half_of_the_time_at_least() -> None:
    found = pace(delay=100)
    found.learn(decode(), 0.4, 0.0)
    assert found.prefill_tokens(1000) == 400


def test_few_tokens_are_computed_in_any_case() -> None:
    found = pace(delay=100, token_seconds=1.0)
    assert found.prefill_tokens(1000) == LEAST_CHUNK
    assert found.prefill_tokens(3) == 3


@settings(deadline=None, derandomize=True)
@given(
    decodes=st.floats(0.001, 0.5),
    fixed=st.floats(0.0, 0.04),
    token=st.floats(0.0001, 0.004),
    guess=st.floats(0.00002, 0.02),
    noise=st.lists(st.floats(0.9, 1.1), min_size=7, max_size=7),
)
def test_the_time_of_chunks_is_learned(
    decodes: float, fixed: float, token: float, guess: float, noise: list[float]
) -> None:
    """Whatever warm-up has measured, and though a chunk has fixed costs."""
    found = pace(delay=100, token_seconds=guess)
    times: list[float] = []
    for number in range(120):
        tokens = found.prefill_tokens(512)
        taken = decodes + (fixed + tokens * token if tokens else 0.0)
        found.learn(chunk(tokens) if tokens else decode(), taken * noise[number % 7], 0.0)
        if tokens:
            times.append(taken - decodes)
    allowed = max(0.1, decodes)
    assert max(times[-20:]) <= 1.25 * allowed
    whole = fixed + 512 * token
    assert max(times[-20:]) >= 0.7 * min(allowed, whole), "time is not left unused"


def test_after_many_chunks_a_step_shows_what_decodes_take_alone() -> None:
    """As more requests run, and none of their steps is without a chunk."""
    found = pace(delay=100)
    found.learn(decode(), 0.01, 0.0)
    tokens = []
    for _ in range(6 * (PROBE_STEPS + 1)):
        tokens.append(found.prefill_tokens(1000))
        found.learn(chunk(tokens[-1]) if tokens[-1] else decode(), 0.3 + tokens[-1] / 1000, 0.0)
    assert tokens.count(0) == 6
    assert 200 <= tokens[-2] <= 330, "as long as the decodes of more requests"


def test_a_single_slow_step_changes_little() -> None:
    found = pace(delay=100)
    for _ in range(30):
        found.learn(decode(), 0.05, 0.0)
        found.learn(chunk(100), 0.15, 0.0)
    found.learn(decode(), 9.0, 0.0)
    found.learn(chunk(100), 9.0, 0.0)
    assert found.prefill_tokens(1000) >= 70


def test_a_token_costs_no_more_in_a_larger_chunk() -> None:
    """A slow hour of large ones is forgotten, though only small ones follow it."""
    costs = ChunkCosts(0.001)
    for _ in range(50):
        costs.learn(200, 20.0)
    assert costs.tokens(0.1, 512) == 1
    for _ in range(60):
        costs.learn(1, 0.001)
    assert costs.tokens(0.1, 512) >= 90


def test_requests_are_bounded_beside_others_and_their_answers_the_same() -> None:
    """The scheduler's part: chunks of 20 ms of tokens that take 1 ms each, alone all 64."""
    bounds = limits(max_prefill_delay=20, token_seconds=0.001)
    found = Harness(bounds)
    found.add(request(1, range(150), 30))
    found.step()
    assert found.worker.steps[0].counts == [64], "no stream waits"
    for _ in range(4):
        found.step()
    found.add(request(2, range(200, 350), 3))
    found.run()
    beside = [step for step in found.worker.steps if step.num_decodes and step.num_prefill_tokens]
    assert {step.num_prefill_tokens for step in beside} == {20, 10}
    assert found.tokens[1] == continuation(range(150), 30, 1000)
    assert found.tokens[2] == continuation(range(200, 350), 3, 1000)


# ---------------------------------------------------------------------- images


def test_the_time_of_decodes_is_an_average_of_late_ones() -> None:
    found = pace(interrupts=False)
    assert found.image_tokens(1000) == int(50 * IMAGE_SHARE)
    for _ in range(3):
        found.learn(decode(), 0.1, 0.0)
    assert found.image_tokens(1000) == int(100 * IMAGE_SHARE)
    assert found.image_tokens(50) == 50
    found = pace(interrupts=True)
    for _ in range(60):
        found.learn(decode(encodes=[slice_of(0.1, rest_seconds=0.2)]), 0.3, 0.1)
    assert found.slice_seconds(1.0) == pytest.approx(0.2 * IMAGE_SHARE, abs=0.002)
    assert found.slice_seconds(0.5) == pytest.approx(0.1 * IMAGE_SHARE, abs=0.002)
    assert found.rest_seconds(decode()) == pytest.approx(0.2, abs=0.002)


def test_chunks_that_cannot_be_ended_are_planned_for_a_part_of_the_time() -> None:
    assert pace(interrupts=True).image_tokens(1000) == int(50 * IMAGE_SHARE * CHUNK_SHARE)
    assert pace(interrupts=False).image_tokens(1000) == int(50 * IMAGE_SHARE), "nor can slices"


def test_decodes_that_others_have_lengthened_are_forgotten_sooner_than_they_count() -> None:
    found = pace(interrupts=True)
    for _ in range(40):
        found.learn(decode(), 0.05, 0.0)
    for _ in range(10):
        found.learn(decode(), 0.1, 0.0)
    busy = found.rest_seconds(decode())
    assert busy < 0.09
    for _ in range(5):
        found.learn(decode(), 0.05, 0.0)
    assert found.rest_seconds(decode()) - 0.05 < (busy - 0.05) / 5


def test_the_rest_of_a_step_is_its_decodes_and_its_chunks() -> None:
    found = pace(interrupts=True)
    assert found.rest_seconds(decode()) == pytest.approx(0.05)
    assert found.rest_seconds(chunk(10)) == pytest.approx(0.06)


@settings(deadline=None, derandomize=True)
@given(
    decodes=st.lists(st.floats(0.008, 0.014), min_size=7, max_size=7),
    piece=st.floats(0.0005, 0.003),
)
def test_steps_with_slices_last_less_than_twice_as_long_as_decodes(
    decodes: list[float], piece: float
) -> None:
    """Whatever each of their decodes takes: the slice gets what that leaves, in whole pieces."""
    found = pace(interrupts=True, step_seconds=0.01)
    times = []
    for number in range(200):
        own = decodes[number % 7]
        part = slice_of(found.slice_seconds(1.0), rest_seconds=found.rest_seconds(decode()))
        assert part.seconds is not None
        left = part.seconds + part.rest_seconds - own
        encoded = max(1, int(left / piece)) * piece
        found.learn(decode(encodes=[part]), own + encoded, encoded)
        times.append(own + encoded)
    usual = sum(decodes) / len(decodes)
    assert max(times[-50:]) <= max(1.9 * usual, max(decodes) + piece)
    assert sum(times[-50:]) / 50 >= 1.25 * usual - piece, "the time is used"


def test_steps_without_decodes_tell_nothing_of_them() -> None:
    found = pace(interrupts=False)
    found.learn(Step(0, encodes=[slice_of(0.05)]), 9.0, 0.0)
    found.learn(Step(0, rows=[1], counts=[8]), 9.0, 0.0)
    found.learn(decode(encodes=[slice_of(None)]), 9.0, 0.0)  # whose part is unknown there
    assert found.image_tokens(1000) == int(50 * IMAGE_SHARE)


def test_slices_that_overrun_their_limit_get_a_lower_one() -> None:
    """But for those that begin an image."""
    found = pace(interrupts=True)
    for _ in range(60):
        found.learn(decode(encodes=[slice_of(0.05, begins=True)]), 0.25, 0.2)
    assert found.slice_seconds(1.0) == pytest.approx(0.05 * IMAGE_SHARE)
    for _ in range(60):
        found.learn(decode(encodes=[slice_of(0.05)]), 0.12, 0.07)
    assert found.slice_seconds(1.0) == pytest.approx(0.05 * IMAGE_SHARE - 0.02, abs=0.001)
    assert found.slice_seconds(0.1) == LEAST_SLICE_SECONDS


def test_decodes_that_take_longer_are_no_overrun_of_slices() -> None:
    """Beyond the time that the slice has taken nevertheless."""
    found = pace(interrupts=True, step_seconds=0.05)
    for _ in range(60):
        found.learn(decode(encodes=[slice_of(0.05)]), 0.301, 0.001)
    usual = found.rest_seconds(decode())
    assert found.slice_seconds(1.0) == pytest.approx(usual * IMAGE_SHARE - 0.001, abs=1e-4)


def test_quick_models_give_images_a_few_milliseconds() -> None:
    found = pace(token_seconds=LEAST_IMAGE_SECONDS / 8, step_seconds=1e-4)
    assert found.image_tokens(1000) == 8
    assert pace(token_seconds=10.0, step_seconds=1e-4).image_tokens(1000) == 1


def test_what_was_not_measured_bounds_nothing() -> None:
    found = pace(token_seconds=0.0, interrupts=True)
    assert found.image_tokens(1000) == 1000
    assert not found.interrupts
