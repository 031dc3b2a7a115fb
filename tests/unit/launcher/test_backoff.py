"""How soon, and how often, a model server that died is started again."""

from __future__ import annotations

import pytest

from tgi_cli.launcher.backoff import FIRST_SECONDS, LONGEST_SECONDS, WINDOW_SECONDS, Restarts


def test_waits_double_up_to_a_bound() -> None:
    restarts = Restarts(9, draw=lambda: 1.0)
    waits = [restarts.next(0.0) for _ in range(9)]
    assert waits[:3] == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    assert waits[-1] == LONGEST_SECONDS


@pytest.mark.parametrize(("draw", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_half_of_a_wait_is_random(draw: float, share: float) -> None:
    assert Restarts(1, draw=lambda: draw).next(0.0) == FIRST_SECONDS * share


def test_restarts_within_the_window_are_limited() -> None:
    restarts = Restarts(3)
    assert all(restarts.next(now) is not None for now in (0.0, 1.0, 2.0))
    assert restarts.next(3.0) is None
    assert restarts.tried == 3


def test_restarts_before_the_window_do_not_count() -> None:
    restarts = Restarts(2, draw=lambda: 1.0)
    assert restarts.next(0.0) == FIRST_SECONDS
    assert restarts.next(10.0) == 2 * FIRST_SECONDS
    assert restarts.next(WINDOW_SECONDS) is None
    assert restarts.next(WINDOW_SECONDS + 1.0) == 2 * FIRST_SECONDS, "the first is forgotten"
    assert restarts.next(3 * WINDOW_SECONDS) == FIRST_SECONDS


def test_zero_restarts_allow_none() -> None:
    assert Restarts(0).next(0.0) is None
