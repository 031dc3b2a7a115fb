from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.gguf_models import CONTROL, NORMAL, metadata_file
from tgi_cli.gguf.special_tokens import GGUFTokens
from tgi_cli.gguf.values import Value


def read(path: Path, tokens: list[str], **keys: Value) -> GGUFTokens:
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            CONTROL if text.startswith("<") else NORMAL for text in tokens
        ],
    }
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return GGUFTokens.read(metadata_file(path / "v.gguf", metadata | keys))


@pytest.mark.parametrize(
    ("tokens", "eos", "ends"),
    [
        (["a", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], 2, (2, 3, 4)),
        (["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>"], 3, (3, 1)),
        # gpt-oss ends messages, not answers, with <|end|>.
        (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"], 1, (1, 0, 3)),
        (["<|end|>", "<|endoftext|>"], 1, (1, 0)),
        # In Gemma 4, </s> is HTML.
        (["<eos>", "<turn|>", "</s>", "<|tool_response>"], 0, (0, 1, 3)),
        (["<strange>", "b"], 0, (0,)),
    ],
)
def test_all_tokens_that_end_answers_are_found(
    tmp_path: Path, tokens: list[str], eos: int, ends: tuple[int, ...]
) -> None:
    assert read(tmp_path, tokens, eos_token_id=eos).ends == ends


def test_gemma_4_begins_with_bos_whatever_the_file_says(tmp_path: Path) -> None:
    for model, stated in (("gemma4", True), ("gpt2", False)):
        found = read(tmp_path, ["<bos>", "a"], model=model, bos_token_id=0, add_bos_token=False)
        assert found.adds_bos is stated


def test_ids_outside_of_the_vocabulary_do_not_count(tmp_path: Path) -> None:
    found = read(tmp_path, ["a", "b"], bos_token_id=7, eos_token_id=1, eot_token_id=0)
    assert (found.bos, found.eos, found.ends) == (None, 1, (1, 0))


def test_empty_tokens_get_names(tmp_path: Path) -> None:
    assert read(tmp_path, ["a", "", ""]).texts == ("a", "[EMPTY_1]", "[EMPTY_2]")
