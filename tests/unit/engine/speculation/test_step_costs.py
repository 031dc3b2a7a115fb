"""Durations of steps follow the measured ones, and those of steps that ran."""

from __future__ import annotations

import pytest

from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import MAX_DRAFT_ROWS, StepTime

ROWS = [
    StepTime(1, 1, 128, 0.010),
    StepTime(1, 2, 128, 0.011),
    StepTime(1, 4, 128, 0.012),
    StepTime(1, 8, 128, 0.020),
    StepTime(1, 16, 128, 0.036),
]
SEQUENCES = [StepTime(2, 2, 128, 0.014), StepTime(4, 4, 128, 0.020), StepTime(8, 8, 128, 0.030)]
LONGER = [StepTime(1, 1, 1128, 0.012), StepTime(1, 8, 1128, 0.029)]


def costs_of(*times: StepTime, most: int = 7) -> StepCosts:
    return StepCosts(times, most)


def test_the_rows_of_one_sequence_cost_what_they_were_measured_to() -> None:
    costs = costs_of(*ROWS).of(1, 128)
    assert costs.seconds == 0.010
    expected = [1.0, 1.1, 1.15, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert costs.measured == pytest.approx(expected), "between points on a line"
    assert costs.durations == costs.measured


def test_draft_rows_of_a_batch_cost_what_rows_cost_on_top_of_its_sequences() -> None:
    costs = costs_of(*ROWS, *SEQUENCES).of(4, 128)
    assert costs.seconds == pytest.approx(0.020)
    assert len(costs.measured) == 29
    assert costs.measured[4] == pytest.approx((0.020 + 0.008) / 0.020)
    assert costs.measured[12] == pytest.approx((0.020 + 0.024) / 0.020)
    assert costs.measured[28] == pytest.approx((0.020 + 0.056) / 0.020), "on beyond the last"


def test_a_longer_context_costs_each_sequence_and_each_draft_more() -> None:
    costs = costs_of(*ROWS, *SEQUENCES, *LONGER).of(4, 128 + 2 * 1024)
    more = 2048 - 128  # contexts are rounded down to a multiple of 512
    a, b = 0.002 / 1000, (0.009 - 0.002) / 1000 / 7
    seconds = 0.020 + 4 * a * more
    assert costs.seconds == pytest.approx(seconds)
    assert costs.measured[4] == pytest.approx((seconds + 0.008 + 4 * b * more) / seconds)


def test_rows_never_count_as_a_gain() -> None:
    """Noise may have made fewer rows look slower than more."""
    costs = costs_of(StepTime(1, 1, 8, 1.0), StepTime(1, 2, 8, 0.8)).of(1, 8)
    assert min(costs.measured) == 1.0


def test_without_measurements_rows_cost_something() -> None:
    costs = StepCosts([], 4).of(1, 500)
    assert costs.measured == pytest.approx([1, 1.05, 1.1, 1.15, 1.2])


def test_the_rows_of_a_step_are_limited() -> None:
    assert len(costs_of(*ROWS).of(500, 10).measured) == MAX_DRAFT_ROWS + 1


def test_whether_drafts_can_pay_is_known_for_each_number_of_sequences() -> None:
    flat = [StepTime(1, rows, 1, 1 + 0.05 * (rows > 8) * (rows - 8)) for rows in (1, 8, 9, 100)]
    costs = costs_of(*flat, StepTime(64, 64, 1, 1.0))
    assert costs.of(1, 1).pay
    steep = costs_of(StepTime(1, 1, 1, 1.0), StepTime(1, 100, 1, 100.0))
    assert not steep.of(1, 1).pay


def test_drafts_may_pay_until_steps_have_shown_that_they_do_not() -> None:
    costs = costs_of(StepTime(1, 1, 1, 1.0), StepTime(1, 100, 1, 120.0))
    found = costs.of(1, 1)
    assert not found.pay
    assert found.may_pay
    assert 1.0 < found.hopes[1] < found.durations[1] < found.limits[1]
    for _ in range(200):
        costs.learn(1, 0, 1, 1.0)
        costs.learn(1, 1, 1, 2.2)
    assert not costs.of(1, 1).may_pay
    for _ in range(400):
        costs.learn(1, 0, 1, 1.0)
        costs.learn(1, 1, 1, 1.5)
    assert costs.of(1, 1).pay


def test_a_slower_machine_changes_nothing_that_compares_steps() -> None:
    costs = costs_of(*ROWS)
    for _ in range(200):
        for drafts, seconds in ((0, 0.020), (1, 0.022), (7, 0.040)):
            costs.learn(1, drafts, 128, seconds)
    assert costs.of(1, 128).durations == pytest.approx([1, 1.1, 1.15, 1.2, 1.4, 1.6, 1.8, 2], 0.05)


def test_steps_that_ran_correct_what_was_measured() -> None:
    costs = costs_of(*ROWS)
    for _ in range(200):
        costs.learn(1, 0, 128, 0.010)
        costs.learn(1, 7, 128, 0.014)
    durations = costs.of(1, 128).durations
    assert durations[7] == pytest.approx(1.4, 0.05)
    assert durations[5] == pytest.approx(1 + 0.6 * 0.4, 0.05), "of fewer rows, too"
    assert durations[1] == pytest.approx(1 + 0.1 * 0.4, 0.05)
    assert costs.of(2, 128).durations[7] == costs.of(2, 128).measured[7], "of another batch"


def test_drafts_have_to_gain_what_is_uncertain_about_their_cost() -> None:
    costs = costs_of(*ROWS, *SEQUENCES)
    before = costs.of(8, 128)
    assert all(b > a for a, b in zip(before.durations[1:], before.limits[1:], strict=True))
    unknown = before.break_even
    for _ in range(100):
        costs.learn(8, 0, 128, 0.030)
        costs.learn(8, 4, 128, 0.030 * before.measured[4])
    known = costs.of(8, 128)
    assert known.durations[4] == pytest.approx(known.measured[4], 0.01)
    assert known.break_even < unknown < 1


def test_beside_prompts_a_row_costs_what_one_of_many_does() -> None:
    """A step with a chunk of a prompt is bound by computation."""
    costs = costs_of(*ROWS, *SEQUENCES)
    alone, beside = costs.of(1, 128), costs.of(1, 128, prompts=True)
    assert beside.seconds == alone.seconds
    assert beside.measured == pytest.approx([1 + 0.2 * drafts for drafts in range(8)])
    assert beside.measured[4] > alone.measured[4]
    assert costs.of(1, 128) is alone


def test_a_step_that_another_program_has_slowed_down_is_corrected_by_longer_ones() -> None:
    """The first of them was measured while something else ran."""
    noisy = [StepTime(1, 1, 128, 0.013), *ROWS[1:]]
    costs = costs_of(*noisy).of(1, 128)
    assert costs.seconds == 0.011, "two rows took no longer"
    assert costs.measured[1:] == pytest.approx([1, *(x / 11 for x in (11.5, 12, 14, 16, 18, 20))])


def test_a_correction_that_is_not_measured_again_is_forgotten() -> None:
    costs = costs_of(*ROWS)
    for _ in range(50):
        costs.learn(1, 1, 128, 0.044)
    assert costs.of(1, 128).durations[1] > 3
    for _ in range(3000):
        costs.learn(1, 0, 128, 0.010)
    assert costs.of(1, 128).durations[1] == pytest.approx(1.1, 0.01)


def test_a_step_that_was_interrupted_hardly_counts() -> None:
    costs = costs_of(*ROWS)
    for _ in range(50):
        costs.learn(1, 3, 128, 0.012)
    costs.learn(1, 3, 128, 10.0)
    for _ in range(14):
        costs.learn(1, 0, 128, 0.010)
    assert costs.of(1, 128).durations[3] < 1.2 * 1.3


def test_steps_of_more_rows_than_are_ever_chosen_are_ignored() -> None:
    costs = costs_of(*ROWS)
    for _ in range(32):
        costs.learn(1, 40, 128, 1.0)
    assert costs.of(1, 128).durations == costs.of(1, 128).measured


def test_looking_up_counts_as_much_as_it_took() -> None:
    """20 us count for a step of 0.1 ms, and for one of 10 ms hardly."""
    short = [time._replace(seconds=time.seconds / 100) for time in ROWS]
    long_steps, short_steps = costs_of(*ROWS), costs_of(*short)
    assert long_steps.of(1, 128).look_up == pytest.approx(0.002)
    assert short_steps.of(1, 128).look_up == pytest.approx(0.2)
    for _ in range(500):
        short_steps.looked_up(5e-6)
        short_steps.learn(1, 0, 128, 0.0001)
    assert short_steps.of(1, 128).look_up == pytest.approx(0.05, 0.01)


def test_drafts_must_gain_more_than_looking_up_takes() -> None:
    """At best 8 tokens in the time of 5 steps, with look-ups of a tenth of a step at first."""
    times = [StepTime(1, 1, 8, 0.0002), StepTime(1, 8, 8, 0.0002 * 5)]
    costs = costs_of(*times)
    assert costs.of(1, 8).pay
    for _ in range(500):
        costs.looked_up(8e-5)
        costs.learn(1, 0, 8, 0.0002)
    assert not costs.of(1, 8).pay


def test_the_time_of_look_ups_is_soon_known() -> None:
    costs = costs_of(*ROWS)
    for _ in range(32):
        costs.looked_up(80e-6)
    assert costs.of(1, 128).look_up == pytest.approx(0.008, 0.25)


def test_one_slow_look_up_hardly_counts() -> None:
    costs = costs_of(*ROWS)
    for _ in range(64):
        costs.looked_up(2e-5)
    costs.looked_up(1.0)
    for _ in range(16):
        costs.learn(1, 0, 128, 0.010)
    assert costs.of(1, 128).look_up == pytest.approx(0.002, 0.07)


def test_what_is_known_of_other_batches_is_corrected_when_it_is_asked_for() -> None:
    costs = costs_of(*ROWS)
    assert costs.of(1, 128).durations == costs.of(1, 128).measured
    before = costs.of(1, 5000)
    for _ in range(200):
        costs.learn(1, 0, 128, 0.010)
        costs.learn(1, 7, 128, 0.014)
    assert costs.of(1, 5000) is before
    assert before.durations[7] < 0.8 * before.measured[7]


def test_catching_up_costs_what_a_first_draft_took_longer_by() -> None:
    proposing = [StepTime(1, 1, 128, 0.013, 1), StepTime(1, 1, 128, 0.015, 3)]
    assert not costs_of(*ROWS, *proposing).catches_up
    assert costs_of(*ROWS, *proposing).catching_up(1000) == 0
    late = StepTime(1, 1, 256, 0.013 + 0.2, 1, 256)
    costs = costs_of(*ROWS, *proposing, late)
    assert costs.catches_up
    assert costs.catching_up(512) == pytest.approx(0.4)
    assert costs.proposing(1, 1) == pytest.approx(0.003), "as without"
    for _ in range(100):
        costs.learn_catching_up(StepTime(1, 1, 128, 0.013 + 0.3, 1, 128))
    assert costs.catching_up(512) == pytest.approx(1.2, rel=0.05)
    assert costs.of(1, 128).durations == costs.of(1, 128).measured
