"""Folders of the user's: taken as they are, once they are known to be whole."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.hub.conftest import CONFIG, model, weights
from tgi_cli.errors import (
    CheckpointError,
    CorruptFileError,
    ExitCode,
    ModelError,
    ModelNotFoundError,
)
from tgi_cli.hub.resolve import LocalModel, resolve_model
from tgi_cli.hub.safetensors_header import read_header

Write = Callable[[dict[str, bytes]], Path]


@pytest.mark.tgi_pain(13)
def test_a_complete_folder_is_used_as_it_is(folder: Write) -> None:
    path = folder(model())
    assert resolve_model(str(path)) == LocalModel(path, str(path), "")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all"])
def test_a_missing_folder_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        resolve_model(name)


def test_a_missing_gguf_file_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "models/Model.GGUF", str(tmp_path / "models" / "x.gguf")):
        with pytest.raises(ModelNotFoundError, match=f"there is no file {name}"):
            resolve_model(name)


@pytest.mark.parametrize("name", ["model_id", "tokenizer"])
def test_a_too_long_name_is_a_model_error(name: str) -> None:
    given = {"model_id": "org/m", name: "x" * 5000}
    with pytest.raises(ModelError, match="too long") as raised:
        resolve_model(**given)
    assert len(str(raised.value)) < 400


def test_folders_without_a_model_are_refused(folder: Write, tmp_path: Path) -> None:
    path = folder({})
    with pytest.raises(ModelError, match="is empty") as caught:
        resolve_model(str(path))
    assert caught.value.exit_code == ExitCode.MODEL_UNUSABLE
    (path / "model.safetensors").write_bytes(weights())
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(path))
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(path / "model.safetensors"))
    (path / "config.json").write_bytes(CONFIG)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors weights"):
        resolve_model(str(path))
    (path / "config.json").write_bytes(b"{")
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        resolve_model(str(path))


def test_the_shards_of_an_index_must_be_there(folder: Write) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = json.dumps({"weight_map": {"w0": shards[0], "w1": shards[1]}}).encode()
    path = folder({"config.json": CONFIG, shards[0]: weights()})
    with pytest.raises(CheckpointError, match=f"lacks {shards[1]}"):
        resolve_model(str(path))
    (path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=f"lacks {shards[1]}"):
        resolve_model(str(path))
    (path / shards[1]).write_bytes(weights(1))
    assert resolve_model(str(path)).path == path


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:40], "truncated"),
        (lambda data: data[:3], "not a safetensors file"),
        (lambda data: b"", "not a safetensors file"),
        (lambda data: data + b"\0", "1 bytes more"),
        (lambda data: b"\xff" * 8 + data[8:], "not a safetensors file"),
        (lambda data: b"<html>" + data, "not a safetensors file"),
        (lambda data: struct.pack("<Q", 8) + b"[1,2,3] ", "header .* cannot be read"),
        (lambda data: data[:8] + b"\0" + data[9:], "header .* cannot be read"),
    ],
)
def test_invalid_safetensors_headers_are_reported(
    folder: Write, damage: Callable[[bytes], bytes], complaint: str
) -> None:
    path = folder({**model(), "model.safetensors": damage(weights())})
    with pytest.raises(CorruptFileError, match=complaint) as caught:
        resolve_model(str(path))
    assert "model.safetensors" in caught.value.cause
    assert caught.value.remedy


def test_a_header_without_tensors_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    read_header(path)


def test_weights_can_be_overridden_by_another_folder(
    folder: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    path = folder(model())
    other = tmp_path / "weights"
    other.mkdir()
    (other / "model.safetensors").write_bytes(weights(size=64))
    monkeypatch.setenv("WEIGHTS_CACHE_OVERRIDE", str(other))
    found = resolve_model(str(path))
    assert found.model_id == str(path)
    assert (found.path / "model.safetensors").read_bytes() == weights(size=64)
    assert (found.path / "config.json").read_bytes() == CONFIG
    assert resolve_model(str(path)) == found, "made once"
    assert resolve_model(str(path), weights=False).path == path
    (other / "model.safetensors").write_bytes(weights(size=128))
    assert resolve_model(str(path)).path != found.path, "and anew when the files change"
    monkeypatch.setenv("WEIGHTS_CACHE_OVERRIDE", str(tmp_path / "none"))
    with pytest.raises(ModelNotFoundError, match="which is not a folder"):
        resolve_model(str(path))
