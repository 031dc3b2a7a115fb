"""Look-ups that gain nothing become rare where they cost something, and stay where they do not."""

from __future__ import annotations

import pytest

from tgi_cli.engine.speculation.look_ups import (
    FUTILE,
    MAX_PAUSE,
    LookUps,
    failing_budget,
    longest_pause,
)


def settled(look_ups: LookUps, gain: float = 0.0, promising: bool = False, longest: int = 7) -> int:
    look_ups.settle(gain, 0.04, promising, longest)
    return look_ups.pause


def test_each_failure_doubles_the_pause_up_to_a_limit() -> None:
    assert [settled(look_ups, longest=7) for look_ups in [LookUps()] * 6] == [1, 3, 7, 7, 7, 7]
    assert [settled(look_ups, longest=99) for look_ups in [LookUps()] * 8][-3:] == [MAX_PAUSE] * 3


def test_a_gain_ends_the_pauses() -> None:
    look_ups = LookUps()
    for _ in range(5):
        settled(look_ups)
    assert settled(look_ups, gain=1.0, promising=True) == 0
    assert settled(look_ups) == 0, "it has gained more than two look-ups cost"


def test_what_verifying_took_counts_against_what_it_gained() -> None:
    look_ups = LookUps()
    assert settled(look_ups, gain=0.05 - 0.1, promising=True) == 0, "one that was right may go on"
    assert settled(look_ups, gain=-0.1) == 1


def test_a_draft_that_would_have_been_worth_it_halves_the_failures() -> None:
    look_ups = LookUps()
    for _ in range(8):
        settled(look_ups, longest=99)
    assert settled(look_ups, promising=True, longest=99) == 7
    assert settled(look_ups, promising=True, longest=99) == 1
    assert settled(look_ups, promising=True, longest=99) == 0


def test_large_gains_do_not_last_for_long() -> None:
    look_ups = LookUps()
    for _ in range(20):
        settled(look_ups, gain=6.0, promising=True)
    pauses = [settled(look_ups) for _ in range(40)]
    assert pauses[0] == 0
    assert pauses[-1] > 0


def test_a_sequence_is_due_again_after_its_pause() -> None:
    assert LookUps(at=7).due(63) == 8
    assert LookUps(at=7, pause=7).due(63) == 8
    assert LookUps(at=8, pause=7).due(63) == 16


@pytest.mark.parametrize("pause", [0, 1, 3, 7, 15, 31, 63])
def test_pauses_of_the_same_length_end_together(pause: int) -> None:
    """So that the steps between are free of look-ups, however many sequences there are."""
    due = {LookUps(at=at, pause=pause).due(63) for at in range(256)}
    assert len(due) == 256 // (pause + 1)
    for at in range(256):
        assert at < LookUps(at=at, pause=pause).due(63) <= at + pause + 1


def test_a_pause_is_no_longer_than_the_load_of_the_step_allows() -> None:
    """It began with many sequences, of which one is left."""
    look_ups = LookUps(at=64, pause=63)
    assert [look_ups.due(longest) for longest in (63, 3, 1, 0)] == [128, 68, 66, 65]


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("cost", [0.0001, 0.004, 0.02, 0.07])
def test_futile_look_ups_take_a_bounded_share_of_the_time(sequences: int, cost: float) -> None:
    pause = longest_pause(sequences, cost)
    assert pause & (pause + 1) == 0, "all bits of a number are set"
    share = sequences * cost / (pause + 1)
    assert share <= FUTILE or pause == MAX_PAUSE
    assert pause == 0 or share >= FUTILE / 2, "no longer than that needs"


@pytest.mark.parametrize("cost", [0.0001, 0.004, 0.02, 0.3])
def test_look_ups_of_many_that_fail_take_a_bounded_share_of_the_time(cost: float) -> None:
    budget, spent, steps = failing_budget(), 0, 4000
    saved = budget.credit
    for _ in range(steps):
        budget.earn()
        spent += sum(budget.spend(cost) for _ in range(1000))
    assert spent * cost <= saved + 2 * FUTILE * steps + cost
    assert spent * cost >= 2 * FUTILE * steps - cost


def test_the_time_until_the_next_look_up_is_known() -> None:
    budget = failing_budget()
    assert budget.wait == 0
    while budget.spend(0.07):
        pass
    for left in range(budget.wait, 0, -1):
        assert budget.wait == left
        assert not budget.spend(0.07)
        budget.earn()
    assert budget.spend(0.07)
