"""The ids that spell a word, in both kinds of vocabularies."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.unit.text import tiny
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import TextWorkers, word_ids


@pytest.mark.parametrize("make", [tiny.byte_level, tiny.byte_fallback])
@pytest.mark.parametrize("word", ["the", "world", " the", "übermorgen", "深"])
def test_behind_a_space_and_within_a_line(make: object, word: str) -> None:
    tokenizer = Tokenizer(make())  # type: ignore[operator]
    bare = word.strip()
    found = word_ids(tokenizer, [word])
    assert found == word_ids(tokenizer, [bare]), "a leading space makes no difference"
    assert len(set(found)) == len(found)
    # Whatever stands before it, the word's own ids are among those found.
    for before in ("a\n", "a ", "\n"):
        ids = tokenizer.encode(before.rstrip(" ") + " " * before.endswith(" ") + bare, False)
        assert any(tuple(ids[-len(each) :]) == each for each in found), (before, ids, found)
    for each in found:
        assert tokenizer.decode(each).strip() == bare


def test_the_model_has_no_part_in_it() -> None:
    """Nothing that a tokenizer adds to a text is banned with a word."""
    tokenizer = Tokenizer(tiny.byte_level())
    assert not any(index in tokenizer.special_ids for ids in word_ids(tokenizer, ["fox"])
                   for index in ids)  # fmt: skip


def test_words_are_encoded_in_one_call_each_once() -> None:
    tokenizer = Tokenizer(tiny.byte_level())
    words = ["the", "fox", "the", " fox", "deep sea"]
    alone = [ids for word in words for ids in word_ids(tokenizer, [word])]
    assert word_ids(tokenizer, words) == tuple(dict.fromkeys(alone))
    assert word_ids(tokenizer, []) == ()


async def test_many_words_are_encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tiny.byte_level())
    workers = TextWorkers(tokenizer, 1)
    here, seen = threading.get_ident(), []

    def encode(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        seen.append((len(texts), threading.get_ident() == here))
        return Tokenizer.encode_batch(tokenizer, texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    try:
        for words in (["a", "few"], [f"word{place}" for place in range(256)], ["x" * 2048]):
            assert await workers.word_ids(words) == word_ids(tokenizer, words)
    finally:
        workers.close()
    assert [(count, inline) for count, inline in seen[::2]] == [(7, True), (769, False), (4, False)]


@pytest.mark.parametrize("length", [0, 10, 3_000, 200_000])
@pytest.mark.parametrize("add_special_tokens", [False, True])
async def test_a_count_is_the_number_of_encoded_tokens(
    length: int, add_special_tokens: bool
) -> None:
    workers = TextWorkers(Tokenizer(tiny.byte_fallback()), 1)
    text = ("the quick fox in the deep sea " * (length // 30 + 1))[:length]
    try:
        ids = await workers.encode(text, add_special_tokens)
        assert await workers.count(text, add_special_tokens) == len(ids)
    finally:
        workers.close()
