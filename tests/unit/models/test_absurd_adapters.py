"""Absurd files of adapters and tokenizers: an error with a cause, and nothing is waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, trainers

from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tgi_cli import demo
from tgi_cli.errors import (
    CheckpointError,
    CorruptFileError,
    LibraryPanicError,
    ModelError,
    TgiError,
)
from tgi_cli.hub.lora_files import resolve_adapter
from tgi_cli.hub.merge_lora import LoraAdapter
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import load_model, read_config
from tgi_cli.models.lora import adapter_rank, lora_targets, read_adapter
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.worker.grammar import read_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"))


def say(folder: Path, **values: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    "values",
    [
        {"r": 10**9},
        {"r": 10**400},
        {"r": True},
        {"r": "8"},
        {"r": -1},
        {"rank_pattern": {"q_proj": 10**12}},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"q_proj": None}},
    ],
    ids=str,
)
def test_a_rank_that_the_weights_do_not_have(
    values: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    folder = say(make_adapter(base, tmp_path / "a", modules=("q_proj",)), **values)
    with pytest.raises(CheckpointError, match="rank"):
        adapter_rank(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"lora_alpha": []},
        {"alpha_pattern": 3},
        {"alpha_pattern": {"(": 1}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_an_invalid_scale_is_refused(values: dict[str, Any], base: Path, tmp_path: Path) -> None:
    folder = say(make_adapter(base, tmp_path / "a", modules=("q_proj",)), **values)
    table = LoraTable(1, 8, 16)
    model = load_model(read_config(base), torch.float32, torch.device("cpu"), lora=table)
    with pytest.raises(CheckpointError, match="no usable r and lora_alpha"):
        read_adapter(folder, lora_targets(model), table, pin=False)


def test_a_pattern_that_backtracks_without_end(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "a", modules=("q_proj",))
    adapter = LoraAdapter.load(say(folder, alpha_pattern={"(a|aa)+$": 1}))
    adapter._patterns._left = 0.2
    with pytest.raises(ValueError, match="takes too long"):
        adapter.scale("a" * 80 + "b")


def test_weights_of_too_high_a_rank_are_not_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter(base, tmp_path / "a", modules=("q_proj",), rank=16)
    table = LoraTable(1, 8, 16)
    model = load_model(read_config(base), torch.float32, torch.device("cpu"), lora=table)
    monkeypatch.setattr(LoraAdapter, "load", lambda _: pytest.fail("it is read"))
    with pytest.raises(ModelError, match="has rank 16, and there is room for 8"):
        read_adapter(folder, lora_targets(model), table, pin=False)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/proc/self", "/", "/dev/fd/0"])
def test_folders_of_the_system_are_no_adapters(path: str) -> None:
    with pytest.raises(TgiError):
        resolve_adapter(path, absolute=True)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pipes_instead_of_an_adapters_files_are_refused(
    name: str, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path / "a", modules=("q_proj",))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError):
        resolve_adapter(str(folder), absolute=True)


def test_a_nested_configuration_of_an_adapter(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "a", modules=("q_proj",))
    (folder / "adapter_config.json").write_text("[" * 200_000)
    for read in (adapter_rank, lambda path: resolve_adapter(str(path))):
        with pytest.raises(CorruptFileError, match="nests more than"):
            read(folder)


def tokenizer(folder: Path, **config: Any) -> Path:
    raw = (demo.model_path() / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(raw)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_keys_of_added_tokens_that_are_no_ids(tmp_path: Path) -> None:
    keys = ["9" * 5000, "\u00b2", "-1", "x", "", str(10**12), "1e9"]
    listed = {key: {"content": f"<a{n}>"} for n, key in enumerate(keys)}
    folder = tokenizer(tmp_path, added_tokens_decoder=listed | {"5": "text", "6": {}})
    before = Tokenizer.load(demo.model_path()).vocab_size
    assert Tokenizer.load(folder).vocab_size == before + len(keys)


def test_many_added_tokens_are_added_at_once(tmp_path: Path) -> None:
    listed = {str(n): {"content": f"<added {n}>"} for n in range(30_000)}
    folder = tokenizer(tmp_path, added_tokens_decoder=listed)  # one by one: minutes
    loaded = Tokenizer.load(folder)
    ids = loaded.encode("<added 7><added 29999>")
    assert loaded.decode(ids, skip_special_tokens=False) == "<added 7><added 29999>"


def test_a_vocabulary_with_an_absurd_id_has_no_grammars(tmp_path: Path) -> None:
    file = tokenizer(tmp_path) / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"]["zzzq"] = 2**28
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="the id 268435456"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_tokenizers_that_are_no_files(kind: str, tmp_path: Path) -> None:
    file = tokenizer(tmp_path) / "tokenizer.json"
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as opened:
            opened.truncate(1 << 40)
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("prefix", ["a", "\u0120", "a" * 1000])
def test_a_prefix_of_subwords_that_merges_lack_is_an_error(prefix: str, tmp_path: Path) -> None:
    file = tokenizer(tmp_path) / "tokenizer.json"
    raw = json.loads(file.read_text())
    assert raw["model"]["merges"]
    raw["model"]["continuing_subword_prefix"] = prefix
    file.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="lacks `continuing_subword_prefix`"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="lacks `continuing_subword_prefix`"):
        read_tokenizer(tmp_path)


def test_a_prefix_of_subwords_that_merges_have_is_accepted(tmp_path: Path) -> None:
    backend = Backend(models.BPE(continuing_subword_prefix="##", unk_token="?"))
    trainer = trainers.BpeTrainer(special_tokens=["?"], continuing_subword_prefix="##")
    backend.train_from_iterator(["abc abd abc"] * 9, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert len(Tokenizer.load(tmp_path).encode("abc")) == 1
    assert read_tokenizer(tmp_path)


def test_a_panic_of_the_library_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        pass

    def panic(path: str) -> None:
        raise PanicException("out of range")

    tokenizer(tmp_path)
    monkeypatch.setattr(Backend, "from_file", panic)
    with pytest.raises(ModelError, match="cannot be read: out of range"):
        Tokenizer.load(tmp_path)
    with pytest.raises(LibraryPanicError):
        read_tokenizer(tmp_path)


def test_an_expression_that_backtracks_without_end_is_an_error(tmp_path: Path) -> None:
    file = tokenizer(tmp_path) / "tokenizer.json"
    raw = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, raw["pre_tokenizer"]]
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    file.write_text(json.dumps(raw))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("aab")
    for encode in (loaded.encode, loaded.spans):
        with pytest.raises(ModelError, match="tokenizer fails on a text"):
            encode("a" * 1000 + "b")
