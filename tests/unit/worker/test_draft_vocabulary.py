"""A draft model's tokens are the target's, or they are mapped by the bytes that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.errors import ModelError
from tgi_cli.worker.speculation.vocabulary import TokenMap, compare, read_vocabulary

BYTE_LEVEL = {"decoder": {"type": "ByteLevel"}}
NESTED = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}}
PIECES = {
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}
}


def folder(path: Path, vocabulary: Any, parts: Any = None, **added: int) -> Path:
    path.mkdir()
    content = {
        "model": {"vocab": vocabulary},
        "added_tokens": [{"content": token, "id": number} for token, number in added.items()],
    }
    (path / "tokenizer.json").write_text(json.dumps(content | (parts or {})))
    return path


def mapped(one: Path, two: Path, sizes: tuple[int, int]) -> TokenMap:
    found = compare(one, two, sizes)
    assert found is not None
    return found


def test_the_same_tokens_with_other_ends_need_no_map(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"a": 0, "b": 1}, end=2, tool=3)
    two = folder(tmp_path / "two", {"a": 0, "b": 1}, end=2)
    assert compare(one, two, (152_064, 151_936)) is None
    assert compare(two, one, (151_936, 152_064)) is None


def test_a_vocabulary_with_scores_is_numbered_by_its_order(tmp_path: Path) -> None:
    scored = folder(tmp_path / "one", [["a", -1.0], ["b", -2.5]], end=2)
    found = read_vocabulary(scored)
    assert found is not None
    assert found.ids == {"a": 0, "b": 1, "end": 2}
    assert compare(scored, folder(tmp_path / "two", {"b": 1, "a": 0}), (3, 3)) is None


def test_tokens_with_other_ids_are_mapped(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"a": 0, "b": 1, "c": 2}, end=3)
    two = folder(tmp_path / "two", {"c": 0, "a": 1, "b": 3}, end=2)
    found = mapped(one, two, (5, 4))
    assert found.outputs.tolist() == [1, 3, 0, 2, -1], "and padding is never drafted"
    assert found.inputs.tolist() == [1, 3, 0, 2, 0]
    assert found.shared == 4


def test_a_token_that_the_draft_model_lacks_is_given_as_its_end(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"ab": 0, "cab": 1, "x": 2, "b": 3})
    two = folder(tmp_path / "two", {"b": 0, "ab": 1})
    found = mapped(one, two, (4, 2))
    assert found.outputs.tolist() == [1, -1, -1, 0]
    assert found.inputs.tolist() == [1, 1, 0, 0], "the longest end, or any token"


@pytest.mark.parametrize("parts", [BYTE_LEVEL, NESTED])
def test_byte_level_tokens_are_compared_with_pieces(tmp_path: Path, parts: Any) -> None:
    """A space, a line feed and an umlaut, as the two kinds of vocabularies write them."""
    one = folder(tmp_path / "one", {"\u0120a": 0, "\u010a": 1, "\u00c3\u00a4": 2, "z": 3}, parts)
    two = folder(tmp_path / "two", {"\u00e4": 0, "<0x0A>": 1, "\u2581a": 2, "<0x20>": 3}, PIECES)
    assert mapped(one, two, (4, 4)).outputs.tolist() == [2, 1, 0, -1]
    assert mapped(two, one, (4, 4)).outputs.tolist() == [2, 1, 0, -1]


def test_a_byte_that_pieces_fall_back_to_is_not_drafted_for_the_piece(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"<0x20>": 0, "\u2581": 1, "<0x41>": 2}, PIECES)
    two = folder(tmp_path / "two", {"\u0120": 1, "A": 0}, BYTE_LEVEL)
    found = mapped(one, two, (3, 2))
    assert found.outputs.tolist() == [-1, 1, 0]
    assert found.inputs.tolist() == [1, 1, 0], "but is read as it"


def test_markers_are_no_texts(tmp_path: Path) -> None:
    """The text of a marker is not the marker, which has its own effect."""
    one = folder(tmp_path / "one", {"end": 0, "a": 1}, turn=2)
    two = folder(tmp_path / "two", {"turn": 0, "a": 2}, end=1)
    assert mapped(one, two, (3, 3)).outputs.tolist() == [-1, 2, -1]


def test_ids_outside_of_a_model_are_left_out(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"a": 0, "b": 1, "c": 9}, late=8)
    two = folder(tmp_path / "two", {"a": 1, "b": 7, "c": 0}, late=2)
    assert mapped(one, two, (2, 3)).outputs.tolist() == [1, -1]


def test_vocabularies_without_a_common_token_are_refused(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"a": 0})
    two = folder(tmp_path / "two", {"b": 0})
    with pytest.raises(ModelError, match="no token in common") as caught:
        compare(one, two, (1, 1))
    assert str(two) in str(caught.value)


def test_without_tokenizers_the_sizes_decide(tmp_path: Path) -> None:
    assert compare(tmp_path, tmp_path, (100, 100)) is None
    with pytest.raises(ModelError, match="has 128 tokens, the model's 100"):
        compare(tmp_path, tmp_path, (100, 128))


@pytest.mark.parametrize(
    "vocabulary", [3, {"a": "b"}, {"a": -1}, {"a": True}, [["a"]], [[3, 0.5]], None]
)
def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path: Path, vocabulary: Any) -> None:
    path = folder(tmp_path / "one", vocabulary)
    with pytest.raises(ModelError, match="cannot be read"):
        compare(path, path, (2, 2))
