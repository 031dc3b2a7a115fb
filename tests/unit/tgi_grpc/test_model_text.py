"""Prompts cut to length with their special tokens, and stop sequences, for step-driven callers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.model_server.fakes import INFO
from tests.unit.text.tiny import BOS, byte_level, write_model
from tgi_cli.engine.messages import FinishReason
from tgi_cli.errors import ModelError
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.tgi_grpc.model_text import ModelText, load_model_text


@pytest.fixture(scope="module")
def text_side() -> ModelText:
    return ModelText(Tokenizer(byte_level()), eos_token_ids=(9,))


def test_a_prompt_is_truncated_behind_its_special_tokens(
    text_side: ModelText,
) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    bare, whole = text_side.encode(text, False, 0), text_side.encode(text, True, 0)
    assert whole == [0, *bare]
    assert text_side.surface(0) == BOS
    assert text_side.encode(text, False, 3) == bare[-3:]
    assert text_side.encode(text, True, 3) == [0, *bare[-2:]]
    assert text_side.encode(text, True, 1) == bare[-1:], "what is asked for last is not given up"
    assert text_side.encode(text, True, len(whole)) == whole
    # One that the text itself begins with is text like any other.
    assert text_side.encode(BOS + text, False, 3) == bare[-3:]


def test_special_ids_are_the_tokenizers_and_the_ends(text_side: ModelText) -> None:
    assert text_side.special_ids == {0, 1, 2, 9}


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
    text_side: ModelText, stops: list[str], place: str | None
) -> None:
    text = "the quick brown fox jumps over the lazy"
    output = text_side.output([], stops, 100)
    for token_id in text_side.encode(text, False, 0):
        output.push(token_id)
        if output.finish_reason is not None:
            break
    if place is None:
        assert output.finish_reason is None
        assert output.text == text
    else:
        assert output.finish_reason is FinishReason.STOP_SEQUENCE
        assert output.text.startswith(place)
        assert place[:-1] not in output.text[: -len(text_side.surface(token_id))]


def test_long_stop_sequences_are_found_and_longer_ones_refused(text_side: ModelText) -> None:
    output = text_side.output([], ["ab" * 512], 1000)
    ids = iter(text_side.encode("ab" * 600, False, 0))
    while output.finish_reason is None:
        output.push(next(ids))
    assert 1024 <= len(output.text) < 1200
    with pytest.raises(ValueError, match="`stop` sequence may have up to 1024 characters"):
        text_side.output([], ["ab" * 513], 1)


def test_pieces_join_to_the_text_for_any_bytes(text_side: ModelText) -> None:
    text = "Grüße 深層学習 🤗"
    ids = text_side.encode(text, False, 0)
    output = text_side.output(text_side.encode("über ", False, 0), ["🤗"], 100)
    pieces, reasons = [], []
    for token_id in ids:
        pieces.append(output.push(token_id))
        reasons.append(output.finish_reason)
    assert "".join(pieces) == output.text == text
    assert reasons == [None] * (len(ids) - 1) + [FinishReason.STOP_SEQUENCE]
    cut = text_side.output([], [], 100)
    for token_id in ids[:-1]:
        cut.push(token_id)
    cut.finish(FinishReason.LENGTH)
    assert cut.text == "Grüße 深層学習 \ufffd"


def test_text_side_is_loaded_from_the_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_model_text(tmp_path, False, INFO)
    found = load_model_text(write_model(tmp_path), False, INFO)
    assert found.special_ids == {0, 1, 2}
    found.close()
