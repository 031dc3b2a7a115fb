"""The tokenizer of checkpoints for benchmarks."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.tools.checkpoints import FIRST_WORD, SPECIAL_TOKENS, write_tokenizer


def test_every_id_of_the_vocabulary_is_a_text_of_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 3000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 3000
    texts = {tokenizer.decode([token]) for token in range(FIRST_WORD, 3000)}
    assert len(texts) == 3000 - FIRST_WORD
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    text = "Any text at all: ω, 7!"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_vocabulary_that_cannot_be(tmp_path: Path) -> None:
    for size in (FIRST_WORD - 1, 10**6):
        with pytest.raises(ValueError, match=str(size)):
            write_tokenizer(tmp_path, size)
