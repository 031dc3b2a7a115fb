"""Stop strings, whatever the borders of the pieces."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_cli.text.stop import ALL_STOP_CHARACTERS, STOP_CHARACTERS, StopBuffer, StopStrings

LETTERS = st.text("abc", max_size=30)
SAME = st.text("aab", max_size=60)
"""Of long repetitions, in which the beginnings of stops overlap."""
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    buffer = StopBuffer(StopStrings(stops))
    shown = ""
    for part in parts:
        shown += buffer.push(part)
        if buffer.hit is not None:
            return shown, buffer.hit
    return shown + buffer.flush(), None


def by_hand(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read letter by letter; the longest of the stops that end first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(stops=STOPS, parts=st.lists(LETTERS, max_size=10))
@settings(max_examples=500, deadline=None)
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], parts: list[str]) -> None:
    assert run(stops, parts) == by_hand(stops, "".join(parts))


@given(stops=st.lists(SAME.filter(bool), max_size=8), parts=st.lists(SAME, min_size=1, max_size=10))
@settings(max_examples=500, deadline=None)
def test_long_stops_that_overlap_are_found_where_the_first_is_complete(
    stops: list[str], parts: list[str]
) -> None:
    assert run(stops, parts) == by_hand(stops, "".join(parts))


@given(stops=STOPS, text=LETTERS)
@settings(max_examples=200, deadline=None)
def test_nothing_shown_has_to_be_taken_back(stops: list[str], text: str) -> None:
    buffer = StopBuffer(StopStrings(stops))
    final, _ = by_hand(stops, text)
    shown = ""
    for letter in text:
        shown += buffer.push(letter)
        assert final.startswith(shown)


def test_only_a_possible_stop_string_is_held_back() -> None:
    buffer = StopBuffer(StopStrings(["<end>"]))
    assert buffer.push("hello <e") == "hello "
    assert buffer.push("x") == "<ex"
    assert buffer.push("<end") == ""
    assert buffer.push("> more") == ""
    assert buffer.hit == "<end>"


def test_empty_stop_strings_are_ignored() -> None:
    assert not StopStrings(["", ""])
    assert run([""], ["abc"]) == ("abc", None)


def test_unicode_stops() -> None:
    assert run(["です"], ["機械で", "す。"]) == ("機械", "です")
    last = "\U0010ffff"
    assert run([last + "\0", "\1"], [f"a{last}", "\0b"]) == ("a", last + "\0")


def test_nothing_follows_a_stop_string() -> None:
    buffer = StopBuffer(StopStrings(["ab"]))
    assert buffer.push("xab") == "x"
    assert (buffer.push("y"), buffer.flush(), buffer.hit) == ("", "", "ab")


LONGEST = [chr(65 + i) + "a" * (STOP_CHARACTERS - 1) for i in range(15)] + ["a" * STOP_CHARACTERS]
"""As much as a request may have."""


def test_the_longest_stops_take_memory_and_time_in_proportion() -> None:
    assert sum(map(len, LONGEST)) == ALL_STOP_CHARACTERS
    tracemalloc.start()
    try:
        strings = StopStrings(LONGEST)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 300 * ALL_STOP_CHARACTERS
    began = time.process_time()
    buffer = StopBuffer(strings)
    text = ("a" * 700 + "b") * 300
    assert "".join(map(buffer.push, text)) + buffer.flush() == text
    assert time.process_time() - began < 3, "2 us a character at most on a slow machine"


@pytest.mark.parametrize(
    ("stops", "cause"),
    [
        (["b", "a" * (STOP_CHARACTERS + 1)], "up to 1024 characters. Given: 1025"),
        (["a" * 200_000], "up to 1024 characters. Given: 200000"),
        ([*LONGEST, "b"], "16384 characters together. Given: 16385"),
    ],
)
def test_longer_ones_are_refused_with_the_bound(stops: list[str], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        StopStrings(stops)
