"""The index finds what a search of the whole text would find."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_cli.engine.speculation.token_index import (
    LONG,
    MAX_LENGTH,
    MAX_VISITS,
    NEAR,
    SEPARATOR,
    SLICE,
    TokenIndex,
)

TEXTS = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def indexed(tokens: list[int], open_end: bool = False) -> TokenIndex:
    index = TokenIndex(tokens, open_end)
    while index.extend():
        pass
    return index


def matches(tokens: list[int], context: list[int], places: range) -> dict[int, int]:
    """The lengths of all matches, by the place behind each."""
    found = {}
    for place in places:
        length = 0
        while (
            length < min(MAX_LENGTH, place, len(context))
            and tokens[place - 1 - length] == context[-1 - length]
        ):
            length += 1
        if length:
            found[place] = length
    return found


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=MAX_VISITS))
def test_the_longest_match_in_the_text_itself_is_found(tokens: list[int]) -> None:
    length, places = indexed(tokens, open_end=True).find(tokens)
    found = matches(tokens, tokens, range(1, len(tokens)))
    longest = max(found.values(), default=0)
    if longest >= 3:  # tokens that are hashed together
        assert length == longest
    else:
        assert length <= longest
        assert bool(length) == bool(found)
    assert all(found[place] >= min(length, LONG) for place in places)
    assert places == sorted(places, reverse=True), "the latest one comes first"


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_matches_in_another_text_are_found(tokens: list[int], context: list[int]) -> None:
    length, places = indexed(tokens).find(context)
    found = matches(tokens, context, range(1, len(tokens) + 1))
    assert bool(length) == bool(found)
    assert all(found[place] >= min(length, LONG) for place in places)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 700), min_size=1, max_size=8),
    st.integers(2, 3000),
)
def test_indexing_at_once_in_slices_and_one_by_one_is_the_same(
    seed: int, parts: list[int], vocabulary: int
) -> None:
    values = [(seed >> 3) + i * i * (seed | 1) for i in range(sum(parts))]
    text = [value % vocabulary for value in values]
    growing: list[int] = []
    index = TokenIndex(growing, open_end=True)
    index_one = TokenIndex([], open_end=True)
    for part in parts:
        begin = len(growing)
        growing.extend(text[begin : begin + part])
        while index.extend(97):
            pass
        for token in text[begin : begin + part]:
            assert isinstance(index_one.tokens, list)
            index_one.tokens.append(token)
            while index_one.extend():
                pass
        assert index.is_complete
        assert index.find(growing) == index_one.find(growing)


def test_a_call_indexes_no_more_than_it_is_asked_to() -> None:
    index = TokenIndex(list(range(3 * SLICE)), open_end=True)
    assert index.extend() == SLICE
    assert not index.is_complete
    assert index.extend(5) == 5
    while index.extend():
        pass
    assert index.is_complete
    assert index.extend() == 0


def test_what_is_not_indexed_yet_is_not_found() -> None:
    tokens = [*range(100, 140), 1, 2, 3, 4, *range(200, 240), 1, 2, 3]
    index = TokenIndex(tokens, open_end=True)
    index.extend(42)
    assert index.find(tokens) == (0, [])
    index.extend()
    assert index.find(tokens) == (3, [43])


def test_long_texts_are_found_after_their_tables_have_grown() -> None:
    text = [i * 7919 % 50021 for i in range(30_000)]
    growing = text[:20]
    index = indexed(growing, open_end=True)
    growing.extend(text[20:])
    growing.extend(text[5000:5010])
    while index.extend():
        pass
    assert index.find(growing) == (10, [5010])


def test_a_copy_with_changes_goes_on_near_to_where_it_was() -> None:
    """Behind a changed token, a single one that matches near there beats others elsewhere."""
    source = [50, 1, 60, 61, 62, 63, 70, 1, 71, 72, 73, 1, 80]
    index = indexed(source)
    assert index.find([9, 1], expected=-1)[1][0] == 12, "the latest place"
    # The copy has reached the token behind 70; in its place, something else was written.
    length, places = index.find([62, 63, 99, 1], expected=7)
    assert places == [8]
    assert length == 1 + NEAR
    assert index.find([60, 61, 62], expected=5) == (3 + NEAR, [5]), "it goes on as expected"


def test_the_most_frequent_continuation_wins_and_then_the_first() -> None:
    tokens = [1, 2, 3, 9, 0, 1, 2, 3, 7, 0, 1, 2, 3, 7, 5, 0, 1, 2, 3]
    index = indexed(tokens, open_end=True)
    length, places = index.find(tokens)
    assert (length, places) == (4, [13, 8]), "a fourth token agrees with two places only"
    chosen, shares = index.follow([3, 8, 13], 3)
    assert chosen == [7, 0, 1]
    assert shares[0] == pytest.approx(2 / 3.25)
    assert index.follow([8, 3], 1)[0] == [7]
    assert index.follow([3, 8], 1)[0] == [9]
    assert index.follow([3], 2) == ([9, 0], pytest.approx([1 / 1.25] * 2))


def test_a_repetition_goes_on_beyond_the_end_of_the_text() -> None:
    tokens = [5, 1, 2, 3, 1, 2, 3]
    index = indexed(tokens, open_end=True)
    _, places = index.find(tokens)
    assert index.follow(places, 8)[0] == [1, 2, 3, 1, 2, 3, 1, 2]


def test_nothing_is_read_beyond_a_separator_or_the_end_of_a_closed_text() -> None:
    text = array("i", [1, 2, 3, 4, SEPARATOR, 1, 2, 3])
    index = TokenIndex(text)
    index.extend()
    _, places = index.find([7, 1, 2])
    assert places == [7, 2]
    assert index.follow(places, 5)[0] == [3]
    assert index.follow([2], 5)[0] == [3, 4]
    assert index.follow([8], 5) == ([], [])


def test_matches_of_one_or_two_tokens_may_be_left_out() -> None:
    index = indexed([1, 2, 3, 4, 5, 6, 2, 3, 7])
    assert index.find([9, 2, 3])[0] == 2
    assert index.find([9, 2, 3], least=2)[0] == 2
    assert index.find([9, 2, 3], least=3) == (0, [])
    assert index.find([2, 3, 4], least=3) == (3, [4])
