"""Prompts cut to length with their special tokens, and stop sequences, for step-driven callers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.model_server.fakes import INFO
from tests.unit.text.tiny import BOS, byte_level, write_model
from tgi_cli.errors import ModelError
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.tgi_grpc.texts import ModelTexts, load_texts


@pytest.fixture(scope="module")
def texts() -> ModelTexts:
    return ModelTexts(Tokenizer(byte_level()), ends=(9,))


def test_a_prompt_is_cut_at_its_beginning_and_keeps_what_stands_in_front(texts: ModelTexts) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    bare, whole = texts.encode(text, False, 0), texts.encode(text, True, 0)
    assert whole == [0, *bare]
    assert texts.surface(0) == BOS
    assert texts.encode(text, False, 3) == bare[-3:]
    assert texts.encode(text, True, 3) == [0, *bare[-2:]]
    assert texts.encode(text, True, 1) == bare[-1:], "what is asked for last is not given up"
    assert texts.encode(text, True, len(whole)) == whole
    # One that the text itself begins with is text like any other.
    assert texts.encode(BOS + text, False, 3) == bare[-3:]


def test_special_ids_are_the_tokenizers_and_the_ends(texts: ModelTexts) -> None:
    assert texts.special_ids == {0, 1, 2, 9}


@pytest.mark.parametrize(
    ("stops", "place"),
    [
        ([], None),
        (["dog"], None),
        (["fox"], "the quick brown fox"),
        (["k b"], "the quick b"),
        (["", "brown fox j", "zzz"], "the quick brown fox j"),
        (["quick brown fox jumps ov", "x j"], "the quick brown fox j"),
    ],
)
def test_a_stop_sequence_ends_where_it_is_complete(
    texts: ModelTexts, stops: list[str], place: str | None
) -> None:
    text = "the quick brown fox jumps over the lazy"
    output = texts.output([], stops)
    for token_id in texts.encode(text, False, 0):
        _, stopped = output.push(token_id)
        if stopped:
            break
    if place is None:
        assert not stopped
        assert output.text() == text
    else:
        assert stopped
        assert output.text().startswith(place)
        assert place[:-1] not in output.text()[: -len(texts.surface(token_id))]


def test_long_stop_sequences_are_found_and_longer_ones_refused(texts: ModelTexts) -> None:
    output = texts.output([], ["ab" * 512])
    ids = texts.encode("ab" * 600, False, 0)
    stopped = [output.push(token_id)[1] for token_id in ids]
    assert len("".join(map(texts.surface, ids[: stopped.index(True) + 1]))) >= 1024
    with pytest.raises(ValueError, match="`stop` sequence may have up to 1024 characters"):
        texts.output([], ["ab" * 513])


def test_pieces_joined_are_the_text_whatever_bytes_come(texts: ModelTexts) -> None:
    text = "Grüße 深層学習 🤗"
    ids = texts.encode(text, False, 0)
    output = texts.output(texts.encode("über ", False, 0), ["🤗"])
    told = [output.push(token_id) for token_id in ids]
    assert "".join(piece for piece, _ in told) == text
    assert [stopped for _, stopped in told] == [False] * (len(ids) - 1) + [True]
    assert output.text() == text
    cut = texts.output([], [])
    for token_id in ids[:-1]:
        cut.push(token_id)
    assert cut.text() == "Grüße 深層学習 \ufffd"


def test_texts_are_read_from_the_models_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_texts(tmp_path, False, INFO)
    found = load_texts(write_model(tmp_path), False, INFO)
    assert found.special_ids == {0, 1, 2}
    found.close()
