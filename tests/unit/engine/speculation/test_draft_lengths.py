"""Drafts are verified as long as the rate of tokens rises."""

from __future__ import annotations

from itertools import product
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_cli.engine.speculation.draft_lengths import (
    MARGIN,
    break_even,
    choose_lengths,
    gain,
    saved_per_token,
)

FALLING = st.lists(st.floats(0.01, 0.99), max_size=3).map(lambda row: sorted(row, reverse=True))


def rate(survivals: list[list[float]], lengths: tuple[int, ...], durations: list[float]) -> float:
    """The geometric mean of the streams' rates."""
    tokens = [1 + sum(row[:length]) for row, length in zip(survivals, lengths, strict=True)]
    return exp(sum(map(log, tokens)) / len(tokens)) / durations[sum(lengths)]


@given(
    st.lists(FALLING, min_size=1, max_size=3),
    st.lists(st.floats(0, 0.5), min_size=9, max_size=9),
)
def test_with_no_other_choice_do_streams_advance_faster(
    survivals: list[list[float]], more: list[float]
) -> None:
    durations = [1 + sum(more[:count]) for count in range(10)]
    chosen = tuple(choose_lengths(survivals, durations))
    best = max(
        rate(survivals, lengths, durations)
        for lengths in product(*(range(len(row) + 1) for row in survivals))
    )
    if best > MARGIN + 1e-9:
        assert rate(survivals, chosen, durations) == pytest.approx(best)
    else:
        assert not any(chosen)


def test_rows_that_cost_nothing_are_all_taken_and_dear_ones_are_not() -> None:
    assert choose_lengths([[0.5, 0.25, 0.1]], [1, 1, 1, 1]) == [3]
    assert choose_lengths([[0.5, 0.25, 0.1]], [1, 1.6, 2.2, 2.8]) == [0]
    assert choose_lengths([[0.5, 0.25, 0.1]], [1, 1.1, 1.2, 1.5]) == [2]


def test_a_step_that_is_dear_may_be_passed_over_for_a_longer_one() -> None:
    """As with tiles of a product: the second row costs what the second to fourth do."""
    assert choose_lengths([[0.9, 0.8, 0.7]], [1, 2, 2, 2]) == [3]


def test_the_likeliest_drafts_of_all_sequences_come_first() -> None:
    survivals = [[0.9, 0.8], [], [0.4, 0.3], [0.85]]
    assert choose_lengths(survivals, [1, 1, 1, 1, 9, 9]) == [2, 0, 0, 1]


def test_no_more_rows_are_taken_than_durations_are_known_of() -> None:
    assert sum(choose_lengths([[0.9] * 5] * 3, [1, 1, 1])) == 2


def test_a_stream_that_repeats_a_text_does_not_slow_down_many_others_by_much() -> None:
    """One of 16 streams would get four tokens for each one, in 1.1 times the time of all."""
    durations = [1, 1.03, 1.06, 1.1]
    assert choose_lengths([[0.99, 0.98, 0.97], *[[]] * 15], durations) == [0] * 16
    assert choose_lengths([[0.99, 0.98, 0.97], []], durations) == [3, 0]
    goodput = (16 + 0.99 + 0.98 + 0.97) / 16 / 1.1
    assert goodput > MARGIN, "their sum would be larger"


def test_the_first_draft_of_a_stream_is_worth_more_than_a_further_one() -> None:
    assert choose_lengths([[0.9, 0.8], [0.7]], [1, 1.01, 1.02, 9]) == [1, 1]


SURVIVALS = st.floats(0.01, 0.999)


@given(
    st.integers(1, 6),
    st.lists(st.floats(0.001, 0.4), min_size=1, max_size=12),
    SURVIVALS,
)
def test_drafts_below_the_break_even_are_worth_nothing(
    sequences: int, more: list[float], survival: float
) -> None:
    durations = [1 + sum(more[:count]) for count in range(len(more) + 1)]
    bound = break_even(sequences, durations)
    likely = [[survival] * 4 for _ in range(sequences)]
    if survival < bound - 1e-9:
        assert not any(choose_lengths(likely, durations))
    elif survival > bound + 1e-9 and len(more) <= 4 * sequences:
        count = sum(choose_lengths([[survival]] * sequences, durations))
        assert count or bound < break_even(sequences, durations[: sequences + 1])


def test_where_no_draft_can_pay_the_break_even_is_one() -> None:
    assert break_even(1, [1, 1.9]) == pytest.approx(MARGIN * 1.9 - 1)
    assert break_even(1, [1, 2.0]) == 1
    assert break_even(4, [1, 1.1, 1.1]) == pytest.approx((MARGIN * 1.1) ** 2 - 1)
    assert break_even(4, [1, 1.26, 1.52]) == 1
    assert break_even(300, [1, 1.01]) == 1
    assert break_even(2, [1]) == 1


def test_what_drafts_save_of_a_token_is_the_best_that_any_number_of_them_does() -> None:
    # Two tokens in 1.25 steps, three in 1.5, 3.5 in 3.
    durations = [1, 1.25, 1.5, 3]
    assert saved_per_token(1, [1.0, 1.0, 0.5], durations) == pytest.approx(0.5)
    assert saved_per_token(1, [1.0], durations) == pytest.approx(1 - 1.25 / 2)
    assert saved_per_token(1, [0.1, 0.1], durations) == 0
    assert saved_per_token(1, [], durations) == 0


def test_where_all_sequences_draft_each_gains_its_share() -> None:
    durations = [1, 1, 1.25, 9, 1.5]
    assert saved_per_token(2, [1.0, 1.0, 1.0], durations) == pytest.approx(0.5 / 2)


def test_a_gain_is_that_of_the_mean_stream_also_where_it_is_a_loss() -> None:
    survivals, durations = [[0.9, 0.5], []], [2.0, 2.2, 2.4]
    assert gain(survivals, [0, 0], durations) == 1.0
    assert gain(survivals, [1, 0], durations) == pytest.approx(1.9**0.5 / 1.1)
    assert gain(survivals, [2, 0], durations) == pytest.approx(2.4**0.5 / 1.2)
    assert gain([[0.1], [0.1]], [1, 1], durations) == pytest.approx(1.1 / 1.2)
