"""Drafts come from predictions, from a request's own tokens and from recent answers."""

from __future__ import annotations

from typing import Any

from tests.unit.engine.fake_grammar import FakeMatcher, slots
from tests.unit.engine.speculation.sequences import sequence
from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.speculation.drafter import Draft
from tgi_cli.engine.speculation.lookup import GrammarDrafter, LookupDrafter
from tgi_cli.engine.speculation.token_index import LONG, NEAR, SLICE
from tgi_cli.sampling.params import SamplingParams


def told(draft: Draft | None) -> tuple[DraftSource, list[int]] | None:
    return None if draft is None else (draft.source, draft.token_ids)


def test_what_followed_in_the_prompt_is_drafted() -> None:
    asked = sequence([1, 2, 3, 4, 5, 6, 7], [90, 2, 3])
    drafter = LookupDrafter()
    assert told(drafter.draft(asked, 3)) == (DraftSource.CONTEXT, [4, 5, 6])
    asked.token_ids += [4, 5, 6]
    assert told(drafter.draft(asked, 3)) == (DraftSource.CONTEXT, [7, 90, 2]), (
        "the answer follows it"
    )


def test_nothing_is_drafted_where_nothing_matches() -> None:
    assert LookupDrafter().draft(sequence(range(100), [500]), 7) is None


def test_a_prediction_is_drafted_from_the_first_token_on() -> None:
    asked = sequence([1, 2, 3], prediction=tuple(range(10, 30)))
    drafter = LookupDrafter()
    draft = drafter.draft(asked, 4)
    assert told(draft) == (DraftSource.PREDICTION, [10, 11, 12, 13])
    assert draft is not None
    assert draft.length == LONG
    asked.token_ids += [10, 11, 12, 13, 14]
    draft = drafter.draft(asked, 4)
    assert told(draft) == (DraftSource.PREDICTION, [15, 16, 17, 18])
    assert draft is not None
    assert draft.length == 5 + NEAR


def test_a_prediction_goes_on_behind_what_was_changed() -> None:
    prediction = (40, 41, 7, 42, 43, 7, 44, 45, 7, 46, 47, 7, 48)
    asked = sequence([1, 2, 3], prediction=prediction)
    drafter = LookupDrafter()
    for token in (40, 41, 7, 99, 98, 7):  # 99, 98 for 42, 43
        drafter.draft(asked, 7)
        asked.token_ids.append(token)
    draft = drafter.draft(asked, 3)
    assert told(draft) == (DraftSource.PREDICTION, [44, 45, 7]), (
        "not behind the last 7, nor the first"
    )


def test_a_longer_match_in_the_context_beats_a_prediction() -> None:
    asked = sequence([1, 2, 3, 4, 5, 6, 60], [2, 3, 4, 5], prediction=(70, 5, 71))
    assert told(LookupDrafter().draft(asked, 2)) == (DraftSource.CONTEXT, [6, 60])


def test_recent_answers_are_drafted_unless_a_long_match_is_nearer() -> None:
    drafter = LookupDrafter()
    drafter.finish(sequence([1], [20, 21, 22, 23, 24]))
    asked = sequence([7, 8], [30, 20, 21], request_id=1)
    assert told(drafter.draft(asked, 4)) == (DraftSource.RECENT, [22, 23, 24])
    near = sequence([30, 20, 21, 77, 78], [30, 20, 21], request_id=2)
    assert told(drafter.draft(near, 2)) == (DraftSource.CONTEXT, [77, 78])


def test_answers_of_another_tenant_salt_or_adapter_are_not_drafted() -> None:
    for other in ({"tenant": b"x"}, {"cache_salt": b"x"}, {"adapter_id": 3}):
        drafter = LookupDrafter()
        drafter.finish(sequence([1], [20, 21, 22, 23], **other))
        assert drafter.draft(sequence([7], [20, 21], request_id=1), 4) is None
        same = sequence([7], [20, 21], request_id=2, **other)
        assert told(drafter.draft(same, 4)) == (DraftSource.RECENT, [22, 23])


def test_prompts_are_not_among_recent_answers() -> None:
    drafter = LookupDrafter()
    drafter.finish(sequence([20, 21, 22, 23], [1]))
    assert drafter.draft(sequence([7], [20, 21], request_id=1), 4) is None


def test_answers_are_not_shared_unless_they_may_be() -> None:
    drafter = LookupDrafter(shares_answers=False)
    drafter.finish(sequence([1], [20, 21, 22, 23]))
    assert drafter.draft(sequence([7], [20, 21], request_id=1), 4) is None


def test_a_request_that_takes_the_id_of_an_ended_one_has_its_own_text() -> None:
    drafter = LookupDrafter(shares_answers=False)
    first = sequence([1, 2, 3], [1, 2])
    assert told(drafter.draft(first, 1)) == (DraftSource.CONTEXT, [3])
    drafter.finish(first)
    assert drafter.draft(sequence([5, 6], [1, 2]), 1) is None


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    prompt = [*range(10, 3 * SLICE), 1, 2, 3]
    drafter = LookupDrafter()
    asked = sequence(prompt, [15, 16, 17])
    assert told(drafter.draft(asked, 2)) == (DraftSource.CONTEXT, [18, 19])
    late = 3 * SLICE - 5
    asked.token_ids += [late, late + 1]
    assert drafter.draft(asked, 2) is None
    assert told(drafter.draft(asked, 2)) == (DraftSource.CONTEXT, [late + 2, late + 3])


def test_what_a_grammar_forces_is_drafted_where_it_may_not_be_appended() -> None:
    drafter = GrammarDrafter()
    bad: dict[str, Any] = {"sampling": SamplingParams(temperature=0.0, bad_words=((5, 6),))}
    asked = sequence([1], grammar="x", **bad)
    assert drafter.draft(asked, 7) is None, "it is not compiled yet"
    asked.matcher = FakeMatcher(slots([11], [12], [13, 14], [15]))
    assert told(drafter.draft(asked, 7)) == (DraftSource.GRAMMAR, [11, 12])
    assert told(drafter.draft(asked, 1)) == (DraftSource.GRAMMAR, [11])
    free = sequence([1], grammar="x")
    free.matcher = FakeMatcher(slots([11], [12]))
    assert drafter.draft(free, 7) is None, "they are appended"
    asked.matcher = FakeMatcher(slots([11, 12]))
    assert drafter.draft(asked, 7) is None


def test_short_matches_in_recent_answers_count_where_the_context_has_none() -> None:
    drafter = LookupDrafter()
    drafter.finish(sequence([1], [20, 21, 22, 23]))
    assert told(drafter.draft(sequence([7], [30, 20, 21], request_id=1), 1)) == (
        DraftSource.RECENT,
        [22],
    )
    near = sequence([21, 77], [30, 20, 21], request_id=2)
    assert told(drafter.draft(near, 1)) == (DraftSource.CONTEXT, [77])
    longer = sequence([22, 77], [20, 21, 22], request_id=3)
    assert told(drafter.draft(longer, 1)) == (DraftSource.RECENT, [23])
