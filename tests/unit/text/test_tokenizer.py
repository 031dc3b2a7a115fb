"""Loading, special tokens, bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.text import tiny, translation
from tgi_cli.errors import ModelError
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import INLINE_CHARACTERS, TextWorkers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny.write_model(tmp_path_factory.mktemp("model")))


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == (tiny.BOS, tiny.EOS)
    named = {tokenizer.backend.token_to_id(name) for name in (tiny.BOS, tiny.EOS, tiny.START)}
    assert tokenizer.special_ids == named


def test_text_gets_the_special_tokens_and_templated_text_does_not(tokenizer: Tokenizer) -> None:
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [tokenizer.backend.token_to_id(tiny.BOS), *bare]
    marked = tokenizer.encode(f"{tiny.START}user", add_special_tokens=False)
    assert marked[0] == tokenizer.backend.token_to_id(tiny.START)


def test_surface_shows_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.surface(tokenizer.backend.token_to_id(tiny.EOS)) == tiny.EOS


@pytest.mark.parametrize("text", ["hello wörld 🤗", "\x00\x7f\xa0\xad"])
def test_the_bytes_of_tokens_make_up_the_text(tokenizer: Tokenizer, text: str) -> None:
    for one in (tokenizer, Tokenizer(tiny.byte_fallback())):
        ids = one.encode(text, add_special_tokens=False)
        raw = b"".join(one.token_bytes(index) for index in ids)
        assert raw.decode().removeprefix(" ") == text


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("the quick brown fox", add_special_tokens=False)) == 4
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    tiny.write_model(tmp_path)
    size = Tokenizer.load(tmp_path).vocab_size
    listed = {str(size): {"content": "<|tool|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<|tool|>", add_special_tokens=False) == [size]
    assert size in tokenizer.special_ids


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    tiny.write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.slow
def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": tiny.BOS, "eos_token": tiny.EOS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": tiny.EOS}))
    tokenizer = Tokenizer.load(tmp_path)
    text = "the quick brown Österreich"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.slow
def test_a_sentencepiece_model_is_converted_without_sentencepiece(tmp_path: Path) -> None:
    """mBART-50 and mT5 are published so."""
    (tmp_path / "sentencepiece.bpe.model").write_bytes(translation.spm(translation.SOURCE_PIECES))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mbart"}))
    config = {"tokenizer_class": "MBart50Tokenizer", "src_lang": "de_DE"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    id_of = tokenizer.backend.token_to_id
    pieces = ("de_DE", "\u2581the", "\u2581fox", "es", "</s>")
    assert tokenizer.encode("the foxes") == [id_of(piece) for piece in pieces]
    assert id_of("\u2581the") == 4
    assert id_of("de_DE") in tokenizer.special_ids


def test_a_folder_without_tokenizer_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="no tokenizer in"):
        Tokenizer.load(tmp_path)


async def test_long_and_short_texts_encode_alike(tokenizer: Tokenizer) -> None:
    workers = TextWorkers(tokenizer, 1)
    text = "the quick brown fox " * (INLINE_CHARACTERS // 10)
    assert await workers.encode(text, True) == tokenizer.encode(text)
    assert await workers.encode("hello", False) == tokenizer.encode("hello", False)
    workers.close()


def test_text_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    tiny.write_model(tmp_path)
    script = (
        "import sys, pathlib\n"
        "from tgi_cli.text.bundle import TextBundle\n"
        f"bundle = TextBundle.load(pathlib.Path({str(tmp_path)!r}))\n"
        "bundle.chat_template.render([{'role': 'user', 'content': 'hi'}])\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_bundle_without_template(tmp_path: Path) -> None:
    assert TextBundle.load(tiny.write_model(tmp_path, None)).chat_template is None
