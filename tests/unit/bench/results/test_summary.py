"""Percentiles, intervals and histograms against numpy and against what is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_cli.bench.statistics.summary import (
    BINS,
    FEWEST,
    PERCENTILES,
    REPLICATES,
    draws,
    histogram,
    interval,
    resampled,
    summarize,
)

numbers = st.floats(0, 1e6, allow_subnormal=False)


@given(st.lists(numbers, min_size=1, max_size=60))
def test_percentiles_are_numpy_s(values: list[float]) -> None:
    summary = summarize(values, intervals=False)
    assert summary is not None
    assert list(summary.percentiles.values()) == list(np.percentile(values, PERCENTILES))
    assert (summary.minimum, summary.maximum) == (min(values), max(values))
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.count == len(values)
    assert summary.intervals == {}


def test_without_values_there_is_no_summary() -> None:
    assert summarize([]) is None


def test_by_hand() -> None:
    summary = summarize(range(1, 102), intervals=False)
    assert summary is not None
    assert (summary.p50, summary.p90, summary.p99) == (51.0, 91.0, 100.0)
    assert summary.p999 == pytest.approx(100.9)


@given(st.lists(st.floats(1, 100), min_size=2, max_size=25), st.integers(0, 3))
def test_weights_equal_copies(values: list[float], seed: int) -> None:
    array = np.asarray(values)
    weights = draws(len(array), seed)
    order = np.argsort(array, kind="stable")
    found = resampled(array, None, PERCENTILES, seed)
    for replicate in (0, 1, len(weights) - 1):
        copies = np.repeat(array[order], weights[replicate][order].astype(int))
        assert copies.size == array.size
        assert found[replicate, 0] == pytest.approx(copies.mean())
        assert found[replicate, 1:] == pytest.approx(np.percentile(copies, PERCENTILES))


@given(
    st.lists(st.lists(st.floats(1, 100), min_size=1, max_size=8), min_size=2, max_size=10),
    st.integers(0, 3),
)
def test_a_request_is_drawn_with_all_its_gaps(groups: list[list[float]], seed: int) -> None:
    array = np.concatenate([np.asarray(group) for group in groups])
    clusters = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    weights = draws(len(groups), seed)
    found = resampled(array, clusters, PERCENTILES, seed)
    for replicate in (0, len(weights) - 1):
        copies = np.concatenate(
            [np.tile(group, int(n)) for group, n in zip(groups, weights[replicate], strict=True)]
        )
        assert found[replicate, 0] == pytest.approx(copies.mean())
        assert found[replicate, 1:] == pytest.approx(np.percentile(copies, PERCENTILES))


def test_grouping_many_gaps_costs_little_precision() -> None:
    dice = np.random.default_rng(5)
    values = dice.lognormal(2, 0.5, 40 * BINS)
    clusters = np.arange(values.size) // 100
    found = resampled(values, clusters, PERCENTILES, 0)
    exact = np.percentile(values, PERCENTILES)
    assert np.median(found[:, 1:], axis=0) == pytest.approx(exact, rel=0.02)


def test_intervals_of_a_mean_are_those_of_theory() -> None:
    values = np.random.default_rng(1).normal(100, 10, 400)
    summary = summarize(values)
    assert summary is not None
    low, high = summary.intervals["mean"]
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.2)
    assert high - low == pytest.approx(2 * 1.96 * 10 / 20, rel=0.15)
    low, high = summary.intervals["p50"]
    assert high - low == pytest.approx(2 * 1.96 * 1.2533 * 10 / 20, rel=0.35)
    assert set(summary.intervals) == {"mean", "p50", "p90", "p95", "p99", "p999"}


def test_gaps_of_one_request_resemble_each_other_and_that_widens_intervals() -> None:
    dice = np.random.default_rng(2)
    level = dice.normal(100, 10, 40)
    values = (level[:, None] + dice.normal(0, 1, (40, 50))).ravel()
    together = summarize(values, np.repeat(np.arange(40), 50))
    apart = summarize(values)
    assert together is not None
    assert apart is not None

    def width(bounds: tuple[float, float]) -> float:
        return bounds[1] - bounds[0]

    assert width(together.intervals["mean"]) > 4 * width(apart.intervals["mean"])


def test_the_same_values_have_the_same_intervals() -> None:
    values = np.random.default_rng(3).exponential(5, 100)
    assert summarize(values, seed=1) == summarize(values, seed=1)
    assert summarize(values, seed=1) != summarize(values, seed=2)


def test_the_middle_of_the_replicates() -> None:
    assert interval(np.arange(1001.0)) == pytest.approx((25.0, 975.0))


@pytest.mark.parametrize(("clusters", "expected"), [(10, REPLICATES), (30_000, FEWEST)])
def test_the_number_of_draws_is_bounded(clusters: int, expected: int) -> None:
    weights = draws(clusters, 0)
    assert weights.shape == (expected, clusters)
    assert (weights.sum(axis=1) == clusters).all()


@given(st.lists(numbers, min_size=1, max_size=50), st.integers(1, 30))
def test_a_histogram_has_all_values(values: list[float], bins: int) -> None:
    found = histogram(values, bins)
    assert sum(found.counts) == len(values)
    assert len(found.edges) == len(found.counts) + 1 <= bins + 4
    assert found.edges[0] <= min(values)
    assert found.edges[-1] >= max(values)
    assert found.edges == sorted(found.edges)


def test_its_edges_are_round() -> None:
    found = histogram([3.2, 4.9, 7.7, 11.3, 12.9], bins=5)
    assert found.edges == [2, 4, 6, 8, 10, 12, 14]
    assert found.counts == [1, 1, 1, 0, 1, 1]


def test_a_long_tail_may_be_put_into_the_last_bin() -> None:
    assert sum(histogram([1, 2, 3, 1000], bins=5, upper=4).counts) == 4
    assert histogram([1, 2, 3, 1000], bins=5, upper=4).edges[-1] <= 5
