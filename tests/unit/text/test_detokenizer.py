"""Pieces of text, joined, are the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.text import tiny
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(tiny.byte_level(), {"bos_token": tiny.BOS, "eos_token": tiny.EOS})
BYTE_FALLBACK = Tokenizer(tiny.byte_fallback(), {"bos_token": "<s>", "eos_token": "</s>"})
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60))
@settings(max_examples=300, deadline=None)
def test_pieces_of_random_ids_join_to_the_decoded_text(ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@BOTH
@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_is_restored(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@BOTH
@given(prompt=st.text(max_size=20), text=st.text(min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_a_prompt_is_context_and_never_output(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(before + ids)
    assert "".join(pieces(tokenizer, ids, before)) == whole[len(tokenizer.decode(before)) :]


@given(ids=st.lists(st.integers(0, BYTE_FALLBACK.vocab_size - 1), max_size=40))
@settings(max_examples=300, deadline=None)
def test_invalid_bytes_lose_no_text_around_them(ids: list[int]) -> None:
    """Byte fallback rewrites a run of bytes that is no UTF-8; letters must still all come."""
    letters = [index for index in ids if index >= 3 + 256]
    joined = "".join(pieces(BYTE_FALLBACK, ids))
    expected = BYTE_FALLBACK.decode(letters).replace(" ", "")
    kept = "".join(letter for letter in joined if letter in set(expected))
    assert len(kept) >= len(expected)


def test_a_split_character_comes_with_its_last_byte() -> None:
    ids = BYTE_LEVEL.encode("🤗!", add_special_tokens=False)
    assert len(ids) == 5
    assert pieces(BYTE_LEVEL, ids) == ["", "", "", "🤗", "!", ""]


def test_an_incomplete_character_is_flushed_as_a_replacement() -> None:
    ids = BYTE_LEVEL.encode("a🤗", add_special_tokens=False)[:-1]
    assert pieces(BYTE_LEVEL, ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_add_nothing() -> None:
    backend = BYTE_LEVEL.backend
    hello = BYTE_LEVEL.encode("hello", add_special_tokens=False)
    ids = [backend.token_to_id(tiny.BOS), *hello, backend.token_to_id(tiny.EOS)]
    assert "".join(pieces(BYTE_LEVEL, ids)) == "hello"


def test_leading_space_behind_a_prompt_is_preserved() -> None:
    prompt = BYTE_FALLBACK.encode("hello", add_special_tokens=False)
    ids = BYTE_FALLBACK.encode("hello the", add_special_tokens=False)[len(prompt) :]
    assert "".join(pieces(BYTE_FALLBACK, ids, prompt)) == " the"


def test_a_prompt_that_ends_within_a_character_does_not_leak() -> None:
    prompt = BYTE_LEVEL.encode("secret 🤗", add_special_tokens=False)[:-1]
    ids = BYTE_LEVEL.encode("hello", add_special_tokens=False)
    assert "".join(pieces(BYTE_LEVEL, ids, prompt)) == "hello"


CONTINUATIONS = [i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == b"\x97"]


@given(
    before=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=20),
    count=st.integers(20, 90),
    text=st.text(max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_invalid_bytes_are_not_held_back_endlessly(
    before: list[int], count: int, text: str
) -> None:
    after = BYTE_LEVEL.encode(text, add_special_tokens=False)
    ids = [*before, *(CONTINUATIONS * count), *after]
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@BOTH
def test_their_cost_is_linear(tokenizer: Tokenizer) -> None:
    byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x97")
    waits = [len(piece) for piece in pieces(tokenizer, [byte] * 500)]
    assert sum(waits) == 500
    assert max(waits) <= 32
