"""Estimates begin with a prior and follow what happened, per class and request."""

from __future__ import annotations

import random

import pytest

from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.speculation.acceptance import Acceptance, Averages, class_of

SHORT, LONG = class_of(DraftSource.CONTEXT, 1), class_of(DraftSource.CONTEXT, 20)


def test_classes_are_by_source_and_by_doubling_lengths() -> None:
    kinds = [class_of(DraftSource.CONTEXT, length) for length in (1, 2, 3, 4, 5, 8, 9, 16, 17, 500)]
    assert kinds == [kinds[0] + step for step in (0, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    assert len(
        {class_of(source, length) for source in DraftSource for length in (1, 2, 3, 5, 9, 17)}
    ) == (len(DraftSource) * 6)


def test_longer_matches_are_likelier_from_the_beginning() -> None:
    acceptance = Acceptance()
    for source in (DraftSource.PREDICTION, DraftSource.CONTEXT, DraftSource.RECENT):
        chances = [
            acceptance.chance(Averages(), class_of(source, length), 1.0)
            for length in (1, 2, 3, 5, 9, 17)
        ]
        assert chances == sorted(chances)
        assert len(set(chances)) == 6


def test_a_share_of_the_votes_scales_the_chance() -> None:
    acceptance = Acceptance()
    whole = acceptance.chance(Averages(), LONG, 1.0)
    assert acceptance.chance(Averages(), LONG, 0.5) == pytest.approx(whole / 2)


@pytest.mark.parametrize("right", [True, False])
def test_a_request_learns_fast_and_others_slowly(right: bool) -> None:
    acceptance, own = Acceptance(), Averages()
    before = acceptance.chance(own, SHORT, 1.0)
    for _ in range(10):
        acceptance.learn(own, SHORT, 1.0, right)
    mine, others = (acceptance.chance(each, SHORT, 1.0) for each in (own, Averages()))
    assert (mine > others > before) if right else (mine < others < before)
    assert acceptance.chance(own, LONG, 1.0) == Acceptance().chance(own, LONG, 1.0)


def test_drafts_of_half_the_votes_that_are_always_right_count_double() -> None:
    acceptance, own = Acceptance(), Averages()
    for _ in range(300):
        acceptance.learn(own, SHORT, 0.5, True)
    assert acceptance.chance(own, SHORT, 0.5) > 0.8
    assert acceptance.chance(own, SHORT, 1.0) == 0.99, "never certain"


def test_what_happened_is_forgotten() -> None:
    acceptance, own = Acceptance(), Averages()
    for right in (True, False):
        for _ in range(300):
            acceptance.learn(own, SHORT, 1.0, right)
    assert acceptance.chance(own, SHORT, 1.0) < 0.1
    assert acceptance.chance(Averages(), SHORT, 1.0) < 0.1


def test_the_drafts_with_the_highest_estimates_are_right_as_often_as_estimated() -> None:
    """Of many requests whose drafts are alike, some look better after a few drafts by chance."""
    chance, acceptance = random.Random(0), Acceptance()
    expected, right, count = 0.0, 0, 0
    requests = [Averages() for _ in range(16)]
    for step in range(600):
        chances = [acceptance.chance(own, SHORT, 1.0) for own in requests]
        best = max(range(len(requests)), key=chances.__getitem__)
        for index, own in enumerate(requests):
            is_right = chance.random() < 0.3
            acceptance.learn(own, SHORT, 1.0, is_right)
            if index == best and step >= 200:
                expected, right, count = expected + chances[index], right + is_right, count + 1
        if step % 5 == 0:  # answers end, and others begin
            requests[chance.randrange(len(requests))] = Averages()
    assert count == 400
    assert expected == pytest.approx(right, rel=0.2)


def test_requests_whose_drafts_are_right_are_told_from_others_nevertheless() -> None:
    chance, acceptance = random.Random(0), Acceptance()
    good, bad = Averages(), [Averages() for _ in range(7)]
    for _ in range(100):
        acceptance.learn(good, LONG, 1.0, chance.random() < 0.95)
        for own in bad:
            acceptance.learn(own, LONG, 1.0, chance.random() < 0.2)
    assert acceptance.chance(good, LONG, 1.0) > 0.75
    assert max(acceptance.chance(own, LONG, 1.0) for own in bad) < 0.5
