"""What draft rows cost is learned from durations, as far as these outweigh their noise."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from tgi_cli.engine.speculation.row_costs import RowCosts

FEW, MANY = 0.02, 0.8
"""What few and many draft rows were measured to add."""


def noisy(chance: random.Random, duration: float, noise: float = 0.1) -> float:
    return duration * (1 + chance.gauss(0, noise))


def test_before_any_step_rows_cost_what_was_measured() -> None:
    (few, deviation), (many, larger) = RowCosts().predict([FEW, MANY])
    assert (few, many) == pytest.approx((1 + FEW, 1 + MANY))
    assert 0 < deviation < larger, "the more rows, the more may be wrong"


def test_noise_does_not_make_cheap_rows_look_free_or_dear() -> None:
    """Averages of some twenty durations would be wrong by two percent and more half of the time."""
    found = []
    for seed in range(50):
        chance, costs = random.Random(seed), RowCosts()
        for _ in range(60):
            costs.learn_plain(noisy(chance, 1.0))
            costs.learn(FEW, noisy(chance, 1 + FEW))
        found.append(costs.predict([FEW])[0][0])
    assert min(found) >= 1
    assert mean(found) == pytest.approx(1 + FEW, abs=0.01)
    assert max(found) < 1 + FEW + 0.04


def test_what_any_draft_costs_is_told_from_what_rows_cost() -> None:
    chance, costs = random.Random(0), RowCosts()
    for number in range(200):
        measured = (FEW, 2 * FEW, MANY)[number % 3]
        costs.learn(measured, noisy(chance, 1.15 + measured))
    few, twice, many = (duration for duration, _ in costs.predict([FEW, 2 * FEW, MANY]))
    assert few == pytest.approx(1.15 + FEW, abs=0.04)
    assert twice == pytest.approx(1.15 + 2 * FEW, abs=0.04)
    assert many == pytest.approx(1.15 + MANY, abs=0.08)


@pytest.mark.parametrize("slope", [0.4, 1.0, 2.0])
def test_rows_may_cost_more_or_less_than_was_measured(slope: float) -> None:
    chance, costs = random.Random(0), RowCosts()
    for _ in range(200):
        costs.learn(MANY, noisy(chance, 1 + slope * MANY))
    half, whole = (duration for duration, _ in costs.predict([MANY / 2, MANY]))
    assert whole == pytest.approx(1 + slope * MANY, abs=0.08)
    assert half == pytest.approx(1 + slope * MANY / 2, abs=0.08), "of other numbers, too"


def test_steps_make_the_estimate_surer_and_forgetting_less_so() -> None:
    costs = RowCosts()
    first = costs.predict([FEW])[0][1]
    for _ in range(50):
        costs.learn(FEW, 1.3)
    duration, deviation = costs.predict([FEW])[0]
    assert deviation < first / 2
    assert duration > 1.2
    for _ in range(2000):
        costs.learn_plain(1.0)
    duration, deviation = costs.predict([FEW])[0]
    assert deviation == pytest.approx(first, rel=0.05)
    assert duration == pytest.approx(1 + FEW, abs=0.01), "what is not measured again is forgotten"


def test_the_noisier_plain_steps_are_the_less_others_are_believed() -> None:
    calm, wild = RowCosts(), RowCosts()
    for number in range(400):
        calm.learn_plain(1.0 + 0.02 * (-1) ** number)
        wild.learn_plain(1.0 + 0.25 * (-1) ** number)
    for costs in (calm, wild):
        for _ in range(10):
            costs.learn(FEW, 1.2)
    (of_calm, sure), (of_wild, unsure) = calm.predict([FEW])[0], wild.predict([FEW])[0]
    assert of_calm > of_wild
    assert sure < unsure


def test_a_step_that_was_interrupted_hardly_counts() -> None:
    costs = RowCosts()
    for _ in range(50):
        costs.learn(FEW, 1 + FEW)
    costs.learn(FEW, 1000.0)
    assert costs.predict([FEW])[0][0] < 1.1
