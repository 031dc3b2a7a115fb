"""A draft model's ids are the target's tokens, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.errors import ModelError
from tgi_cli.worker.speculation.vocabulary import check_vocabulary, tokens_of


def folder(path: Path, vocabulary: Any, **added: int) -> Path:
    path.mkdir()
    content = {
        "model": {"vocab": vocabulary},
        "added_tokens": [{"content": token, "id": number} for token, number in added.items()],
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def test_the_same_tokens_with_other_ends_are_accepted(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"a": 0, "b": 1}, end=2, tool=3)
    two = folder(tmp_path / "two", {"a": 0, "b": 1}, end=2)
    check_vocabulary(one, two, (152_064, 151_936))
    check_vocabulary(two, one, (151_936, 152_064))


def test_a_vocabulary_with_scores_is_numbered_by_its_order(tmp_path: Path) -> None:
    scored = folder(tmp_path / "one", [["a", -1.0], ["b", -2.5]], end=2)
    assert tokens_of(scored) == {"a": 0, "b": 1, "end": 2}
    check_vocabulary(scored, folder(tmp_path / "two", {"b": 1, "a": 0}), (3, 3))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"a": 1, "b": 0}, "'a' has the id 1, and 0"),
        ({"a": 0, "c": 1}, "the id 1 is 'c', and 'b'"),
    ],
)
def test_other_tokens_are_refused_by_name(tmp_path: Path, other: Any, words: str) -> None:
    one = folder(tmp_path / "one", {"a": 0, "b": 1})
    two = folder(tmp_path / "two", other)
    with pytest.raises(ModelError, match=words) as caught:
        check_vocabulary(one, two, (2, 2))
    assert str(two) in str(caught.value)


def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path / "one", 3)
    with pytest.raises(ModelError, match="cannot be read"):
        check_vocabulary(path, path, (2, 2))
