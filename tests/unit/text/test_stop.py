"""Stop strings, whatever the borders of the pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_cli.text.stop import StopBuffer, StopStrings

LETTERS = st.text("abc", max_size=30)
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


@given(stops=STOPS, text=LETTERS)
@settings(max_examples=200, deadline=None)
def test_nothing_shown_has_to_be_taken_back(stops: list[str], text: str) -> None:
    buffer = StopBuffer(StopStrings(stops))
    final, _ = by_hand(stops, text)
    shown = ""
    for letter in text:
        shown += buffer.push(letter)
        assert final.startswith(shown)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    buffer = StopBuffer(StopStrings(["<end>"]))
    assert buffer.push("hello <e") == "hello "
    assert buffer.push("x") == "<ex"
    assert buffer.push("<end") == ""
    assert buffer.push("> more") == ""
    assert buffer.hit == "<end>"


def test_empty_stops_say_nothing() -> None:
    assert not StopStrings(["", ""])
    assert run([""], ["abc"]) == ("abc", None)


def test_unicode_stops() -> None:
    assert run(["です"], ["機械で", "す。"]) == ("機械", "です")
