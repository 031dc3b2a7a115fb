"""From the tokens of one sequence to its text, its deltas and its finish reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.unit.text import tiny
from tgi_cli.engine.messages import FinishReason
from tgi_cli.text.sequence_text import CutAt, SequenceText
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny.byte_level(), {"bos_token": tiny.BOS, "eos_token": tiny.EOS})
TEXT = "the quick brown fox jumps"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)


def sequence(stops: list[str] | None = None, **options: Any) -> SequenceText:
    options = {"hidden_ids": TOKENIZER.special_ids} | options
    return SequenceText(TOKENIZER, [], StopStrings(stops or []), **options)


def deltas(text: SequenceText, ids: list[int]) -> list[str]:
    """What each token adds to the output, up to the end."""
    found = []
    for token_id in ids:
        text.push(token_id)
        found.append(text.take())
        if text.finish_reason is not None:
            break
    return found


@given(ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
@settings(max_examples=100, deadline=None)
def test_deltas_join_to_the_text(ids: list[int]) -> None:
    text = sequence()
    shown = "".join(deltas(text, ids))
    assert text.text == shown
    text.finish(FinishReason.LENGTH)
    assert shown + text.take() == text.text == TOKENIZER.decode(ids)
    assert (text.num_tokens, text.finish_reason) == (len(ids), FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("cut_at", "expected"),
    [
        (CutAt.BEFORE_STOP, "the quick br"),
        (CutAt.AFTER_STOP, "the quick brow"),
        (CutAt.AFTER_TOKEN, "the quick brow"),
    ],
)
def test_a_stop_string_ends_the_text_at_the_chosen_point(cut_at: CutAt, expected: str) -> None:
    text = sequence(["ow"], cut_at=cut_at)
    shown = "".join(deltas(text, IDS))
    assert shown == text.text
    assert text.text.startswith(expected)
    if cut_at is not CutAt.AFTER_TOKEN:
        assert text.text == expected
    assert (text.stop, text.finish_reason) == ("ow", FinishReason.STOP_SEQUENCE)
    text.finish(FinishReason.EOS_TOKEN)
    assert text.text == shown
    assert text.finish_reason is FinishReason.STOP_SEQUENCE


def test_a_possible_stop_string_is_held_back_until_the_end() -> None:
    text = sequence(["jumps over"])
    assert "".join(deltas(text, IDS)) == "the quick brown fox "
    text.finish(FinishReason.EOS_TOKEN)
    assert text.take() == "jumps"
    assert text.text == TEXT
    assert text.stop is None


def test_a_stop_string_in_the_last_allowed_token_counts_as_the_length_on_request() -> None:
    for limit, reason in (
        (None, FinishReason.STOP_SEQUENCE),
        (len(IDS), FinishReason.LENGTH),
        (len(IDS) + 1, FinishReason.STOP_SEQUENCE),
    ):
        text = sequence(["umps"], length_first=limit)
        deltas(text, IDS)
        assert text.finish_reason is reason


def test_stop_strings_are_ignored_in_the_first_tokens() -> None:
    text = sequence(["the"], min_tokens=len(IDS))
    assert "".join(deltas(text, IDS)) == TEXT
    assert text.finish_reason is None


def test_special_tokens_have_a_text_of_their_own_and_add_nothing_to_the_output() -> None:
    eos = TOKENIZER.backend.token_to_id(tiny.EOS)
    text = sequence()
    assert [text.push(token_id) for token_id in (eos, IDS[0])] == [
        tiny.EOS,
        TOKENIZER.decode(IDS[:1]),
    ]
    assert text.take() == TOKENIZER.decode(IDS[:1])
    shown = sequence(shown_ids=frozenset([eos]))
    shown.push(eos)
    assert shown.text == tiny.EOS


@pytest.mark.parametrize("special", [True, False])
def test_a_character_that_a_marker_cuts_off_ends_in_front_of_it(special: bool) -> None:
    backend = tiny.byte_level()
    backend.add_tokens([AddedToken("</think>", special=special)])
    tokenizer = Tokenizer(backend)
    marker = tokenizer.encode("</think>", False)
    part, whole = tokenizer.encode("深", False)[:-1], tokenizer.encode("so 深", False)
    text = SequenceText(
        tokenizer, [], hidden_ids=tokenizer.special_ids, shown_ids=tokenizer.special_ids
    )
    pieces = deltas(text, [*part, *marker, *whole])
    assert pieces[len(part)] == "\ufffd</think>"
    assert text.text == "\ufffd</think>so 深"
