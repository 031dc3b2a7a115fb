"""Tokenizers from metadata: against their originals, SentencePiece's rule, llama.cpp's vectors."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.tools.gguf_models import (
    NORMAL,
    SPM_TOKENS,
    demo_metadata,
    metadata_file,
    spm_metadata,
)
from tgi_cli import demo
from tgi_cli.errors import CorruptFileError, UnsupportedModelError
from tgi_cli.gguf.chat_template import as_config, chat_templates
from tgi_cli.gguf.reader import read_gguf
from tgi_cli.gguf.tokenizer import read_tokenizer, tokenizer_config
from tgi_cli.gguf.values import Value

VOCABULARIES = os.environ.get("TGI_TEST_GGUF_VOCABULARIES", "")
"""llama.cpp's folder ``models``."""

SEPARATOR = "\n__ggml_vocab_test__\n"
"""Follows each text of a file with vectors."""

WITH_VECTORS = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two spaces, it's 12345 o'clock\n\n\tnext",
    "ünïcödé 日本語 🤖 \u0301",
    "<|im_start|>user\nhi<|im_end|>",
)


def made(path: Path, metadata: Mapping[str, Value]) -> Tokenizer:
    return read_tokenizer(metadata_file(path / "vocabulary.gguf", metadata))


@pytest.mark.skipif(not VOCABULARIES, reason="TGI_TEST_GGUF_VOCABULARIES names no folder")
@pytest.mark.parametrize("name", WITH_VECTORS)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    path = Path(VOCABULARIES) / f"ggml-vocab-{name}.gguf"
    tokenizer = read_tokenizer(read_gguf(path))
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().removesuffix(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text().removesuffix("\n")
    wrong = [
        (text, line, found)
        for text, line in zip(texts.split(SEPARATOR), lines.split("\n"), strict=True)
        if (found := tokenizer.encode(text, add_special_tokens=False).ids)
        != [*map(int, line.split())]
    ]
    assert not wrong


def test_byte_level_tokenizers_are_their_originals(tmp_path: Path) -> None:
    found = made(tmp_path, demo_metadata())
    original = Tokenizer.from_file(str(demo.model_path() / "tokenizer.json"))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids
        for skip in (True, False):
            expected = original.decode(ids, skip_special_tokens=skip)
            assert found.decode(ids, skip_special_tokens=skip) == expected


def sentencepiece_ids(text: str, prefix: str = "▁") -> list[int]:
    """What SentencePiece does: merge the pair with the best score, the first one of equals."""
    scores = {piece: score for piece, score, kind in SPM_TOKENS if kind == NORMAL}
    ids = {piece: index for index, (piece, _, _) in enumerate(SPM_TOKENS)}
    pieces = list(prefix + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [left + right for left, right in itertools.pairwise(pieces)]
        ranked = [(scores[pair], -at) for at, pair in enumerate(pairs) if pair in scores]
        if not ranked:
            break
        at = -max(ranked)[1]
        pieces[at : at + 2] = [pairs[at]]
    found = []
    for piece in pieces:
        known = [ids[piece]] if piece in scores else []
        found += known or [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


def test_sentencepiece_merges_by_scores(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, spm_metadata())
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices("  theinadsrotgwqé\n", k=draw.randrange(1, 30)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_ids(text), text
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_cut_out_and_put_around(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, spm_metadata())
    user = len(SPM_TOKENS) - 1
    assert tokenizer.encode("the").ids == [1, *sentencepiece_ids("the")]
    assert tokenizer.encode("the<|user|>in</s>", add_special_tokens=False).ids == [
        *sentencepiece_ids("the"),
        user,
        *sentencepiece_ids("in"),
        2,
    ]
    assert tokenizer.decode([1, user, 2]) == "<|user|>"
    neither = made(tmp_path, spm_metadata(add_bos_token=False, add_space_prefix=False))
    assert neither.encode("the").ids == sentencepiece_ids("the", "")
    both = made(tmp_path, spm_metadata(add_eos_token=True))
    assert both.encode("the").ids == [1, *sentencepiece_ids("the"), 2]
    assert both.encode("the", "in").ids[-1] == 2


def test_spaces_behind_special_tokens_of_phi_3_are_theirs(tmp_path: Path) -> None:
    named = spm_metadata() | {"general.name": "Phi-3 mini"}
    assert (
        made(tmp_path, named).encode("</s>  in").ids == made(tmp_path, named).encode("</s>in").ids
    )
    plain = made(tmp_path, spm_metadata())
    assert plain.encode("</s>  in").ids != plain.encode("</s>in").ids


SPLITS = {
    "gpt-2": ["It", "'s", " 1234", " Cafe", "\u0301", "s", ",", "\n\n ", " x"],
    "llama-bpe": ["It", "'s", " ", "123", "4", " Cafe", "\u0301s", ",\n\n", " ", " x"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " Caf\u00e9s", ",\n\n", " ", " x"],
    "qwen35": ["It", "'s", " ", "1", "2", "3", "4", " Cafe\u0301s", ",\n\n", " ", " x"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", " Cafe\u0301s", ",\n\n", " ", " x"],
    "gpt-4o": ["It's", " ", "123", "4", " Cafe\u0301s", ",\n\n", " ", " x"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", " Cafe", "\u0301", "s", ",", "\n\n ", " x"],
    "deepseek-v3": ["It", "'s", " ", "123", "4", " Cafe\u0301s", ",\n\n", " ", " x"],
    "bloom": ["It's", " 1234", " Cafe\u0301s", ",\n\n ", " x"],
    "youtu": ["It's", " ", "1", "2", "3", "4", " Cafe\u0301s", ",\n\n", " ", " x"],
}
"""By name, the parts of a text, in which no merges reach over their bounds."""


@pytest.mark.parametrize("name", SPLITS)
def test_texts_are_split_as_the_name_says(tmp_path: Path, name: str) -> None:
    tokenizer = made(tmp_path, demo_metadata(pre=name))
    text = "It's 1234 Cafe\u0301s,\n\n  x"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.pre_tokenizer is not None
    parts = [
        tokenizer.decoder.decode([part])
        for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ]
    assert parts == SPLITS[name]


def test_llama_3_takes_words_that_are_tokens_whole(tmp_path: Path) -> None:
    metadata = demo_metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    added = {"tokenizer.ggml.tokens": [*tokens, "zzqzz"], "tokenizer.ggml.token_type": [*types, 1]}
    for name, whole in (("llama-bpe", True), ("gpt-2", False)):
        ids = made(tmp_path, metadata | added | {"tokenizer.ggml.pre": name}).encode("zzqzz").ids
        assert (ids[-1] == len(tokens)) is whole


def test_bos_is_added_where_the_file_or_else_the_vocabulary_says(tmp_path: Path) -> None:
    def begins(**keys: Value) -> bool:
        return made(tmp_path, demo_metadata(bos_token_id=1, **keys)).encode("a").ids[0] == 1

    assert begins(pre="llama-bpe")
    assert begins(pre="gpt-2", add_bos_token=True)
    assert not begins(pre="gpt-2")
    assert not begins(pre="llama-bpe", add_bos_token=False)


def test_a_complete_tokenizer_json_in_the_file_is_used(tmp_path: Path) -> None:
    text = (demo.model_path() / "tokenizer.json").read_text()
    found = made(tmp_path, demo_metadata(pre="strange") | {"tokenizer.huggingface.json": text})
    assert json.loads(found.to_str()) == json.loads(Tokenizer.from_str(text).to_str())


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        (demo_metadata(pre="martian"), "unknown pre-tokenizer 'martian'"),
        (demo_metadata(pre=None), "does not name its pre-tokenizer"),
        (demo_metadata(pre="default"), "does not name its pre-tokenizer"),
        (demo_metadata(merges=None), "no merges"),
        (demo_metadata(token_type=None), "no types"),
        (demo_metadata(token_type=[NORMAL]), "types of 1 of its 4096"),
        (demo_metadata(tokens=None), "no tokenizer"),
        (spm_metadata(scores=None), "no scores"),
        (spm_metadata(scores=[-1000.0] * len(SPM_TOKENS)), "the same score"),
        (spm_metadata(scores=[math.nan] * len(SPM_TOKENS)), "no numbers"),
        (spm_metadata(tokens=["a", "a"], token_type=[1, 1]), "a token twice"),
        (spm_metadata(tokens=["a", "b" * 2000], token_type=[1, 1]), "token of 2000 characters"),
        (
            spm_metadata(
                tokens=[f"{number:01000}" for number in range(300)],
                token_type=[1] * 300,
                scores=[float(number) for number in range(300)],
            ),
            "too many long tokens",
        ),
        (spm_metadata() | {"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
    ],
)
def test_files_that_would_give_wrong_ids_are_refused(
    tmp_path: Path, metadata: dict[str, Value], complaint: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=complaint) as caught:
        made(tmp_path, metadata)
    assert "--tokenizer-name" in caught.value.remedy


def test_a_tokenizer_json_in_the_file_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}
    text = json.dumps({"model": model | {"continuing_subword_prefix": "##"}})
    with pytest.raises(CorruptFileError, match="lacks `continuing_subword_prefix`"):
        made(tmp_path, demo_metadata() | {"tokenizer.huggingface.json": text})


def test_contradictions_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"the tokenizer of .* cannot be read") as caught:
        made(tmp_path, demo_metadata(merges=["not there"]))
    assert "\n" not in caught.value.cause


def test_the_configuration_names_tokens_and_templates(tmp_path: Path) -> None:
    named = spm_metadata() | {
        "tokenizer.chat_template": "{{ bos_token }}",
        "tokenizer.chat_template.rag": "{{ documents }}",
        "tokenizer.chat_templates": ["rag"],
    }
    file = metadata_file(tmp_path / "v.gguf", named)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer_config(file) == special
    assert as_config(chat_templates(file)) == [
        {"name": "default", "template": "{{ bos_token }}"},
        {"name": "rag", "template": "{{ documents }}"},
    ]
    assert as_config({"default": "{{ bos_token }}"}) == "{{ bos_token }}"
