"""Pickles to safetensors, in a child process that refuses what is not tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.hub_server import HubServer
from tests.unit.hub.conftest import CONFIG
from tgi_cli.errors import CorruptFileError, DiskFullError, ModelError
from tgi_cli.hub import child_process
from tgi_cli.hub.convert import convert, load_pickle, names_tied_by_class, untie
from tgi_cli.hub.resolve import resolve_model

Write = Callable[[dict[str, bytes]], Path]


def tensors() -> dict[str, torch.Tensor]:
    """Two layers, an embedding, and a head that is the embedding; one tensor not contiguous."""
    torch.manual_seed(1)
    embedding = torch.randn(8, 4, dtype=torch.bfloat16)
    return {
        "lm_head.weight": embedding,
        "model.embed_tokens.weight": embedding,
        "model.layers.0.w": torch.randn(4, 6).T,
        "model.layers.1.w": torch.arange(5),
    }


def pickled(path: Path, state: Any, **options: Any) -> bytes:
    torch.save(state, path, **options)
    data = path.read_bytes()
    path.unlink()
    return data


def test_a_repository_with_bin_only_is_converted(hub: HubServer, tmp_path: Path) -> None:
    state = tensors()
    first = {name: state[name] for name in list(state)[:3]}
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    index = {"weight_map": {name: shards[name not in first] for name in state}}
    hub.add(
        "org/m",
        {
            "config.json": CONFIG,
            shards[0]: pickled(tmp_path / "1", first),
            shards[1]: pickled(tmp_path / "2", {"model.layers.1.w": state["model.layers.1.w"]}),
            "pytorch_model.bin.index.json": json.dumps(index).encode(),
            "training_args.bin": b"never fetched",
        },
    )
    path = resolve_model("org/m").path
    written = json.loads((path / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "model.layers.0.w": "model-00001-of-00002.safetensors",
        "model.layers.1.w": "model-00002-of-00002.safetensors",
    }
    assert written["metadata"]["total_size"] == 8 * 4 * 2 + 24 * 4 + 5 * 8
    loaded = load_file(path / "model-00001-of-00002.safetensors")
    loaded |= load_file(path / "model-00002-of-00002.safetensors")
    del state["lm_head.weight"]
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert not list(path.glob(".converting*"))
    assert "training_args.bin" not in hub.fetched()

    # The next run finds the conversion, and does not miss the pickles if they are gone.
    for shard in shards:
        (path / shard).resolve().unlink()
        (path / shard).unlink()
    hub.seen.clear()
    assert resolve_model("org/m").path == path
    assert hub.seen == []


def test_no_auto_convert_refuses_pickles(hub: HubServer, folder: Write, tmp_path: Path) -> None:
    files = {"config.json": CONFIG, "pytorch_model.bin": pickled(tmp_path / "1", tensors())}
    hub.add("org/m", files)
    with pytest.raises(ModelError, match=r"org/m has \.bin weights only") as caught:
        resolve_model("org/m", auto_convert=False)
    assert "--no-auto-convert" in caught.value.remedy
    assert hub.seen == []
    with pytest.raises(ModelError, match="no-auto-convert"):
        resolve_model(str(folder(files)), auto_convert=False)


def test_bin_files_can_be_requested_by_extension(hub: HubServer) -> None:
    hub.add("org/m", {"config.json": CONFIG, "pytorch_model.bin": b"anything"})
    path = resolve_model("org/m", extension="bin").path
    assert (path / "pytorch_model.bin").read_bytes() == b"anything"
    hub.add("org/n", {"config.json": CONFIG, "model.safetensors": b"x"})
    with pytest.raises(ModelError, match=r"no \.bin weights") as caught:
        resolve_model("org/n", extension=".bin")
    assert "--extension" in caught.value.remedy


def test_a_read_only_folder_is_converted_beside_the_cache(
    hub: HubServer, folder: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder({"config.json": CONFIG, "pytorch_model.bin": pickled(tmp_path / "1", tensors())})
    before = sorted(path.iterdir())
    real = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: place != path and real(place, mode))
    first = resolve_model(str(path)).path
    assert sorted(path.iterdir()) == before
    assert first.is_relative_to(tmp_path / "tgi-converted")
    assert {p.name for p in first.iterdir()} == {"config.json", "model.safetensors"}
    stamp = (first / "model.safetensors").stat()
    assert resolve_model(str(path)).path == first
    assert (first / "model.safetensors").stat() == stamp


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch pwned",))


def test_a_pickle_that_runs_something_is_refused(
    folder: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = pickled(tmp_path / "1", {"w": torch.zeros(1), "x": _Evil()})
    path = folder({"config.json": CONFIG, "pytorch_model.bin": bad})
    # The child starts in another folder than the tests do.
    monkeypatch.setenv("PYTHONPATH", str(Path(child_process.__file__).parents[2]))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is refused.*system") as caught:
        resolve_model(str(path))
    assert "safetensors" in caught.value.remedy
    assert not (tmp_path / "pwned").exists()
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "pytorch_model.bin"]


def test_truncated_pickles_are_refused(tmp_path: Path) -> None:
    data = pickled(tmp_path / "1", tensors())
    path = tmp_path / "pytorch_model.bin"
    for size in (len(data) // 2, 10, 0):
        path.write_bytes(data[:size])
        with pytest.raises((CorruptFileError, ModelError), match=r"pytorch_model\.bin"):
            load_pickle(path)


def test_pickles_of_old_torch_versions_are_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    old = pickled(tmp_path / "1", tensors(), _use_new_zipfile_serialization=False)
    (tmp_path / "pytorch_model.bin").write_bytes(old)
    convert(tmp_path, tmp_path)
    assert torch.equal(
        load_file(tmp_path / "model.safetensors")["model.layers.1.w"], torch.arange(5)
    )


def test_tied_names_are_dropped_as_the_class_declares(folder: Write) -> None:
    path = folder({"config.json": CONFIG})
    assert names_tied_by_class(path) == ["lm_head.weight"]
    for config in (b"{}", b'{"architectures": ["os"]}', b'{"architectures": []}'):
        (path / "config.json").write_bytes(config)
        assert names_tied_by_class(path) == []
    weight = torch.ones(2, 2)
    both = {"b.special": weight, "a.owner": weight}
    assert list(untie(both, list)) == ["b.special"]
    assert list(untie(both, lambda: [r"b\.special"])) == ["a.owner"]
    assert list(untie({"lm_head.weight": weight, "wte.weight": weight}, list)) == ["wte.weight"]


def test_views_of_one_storage_become_tensors_of_their_own() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    found = untie({"q": whole[0], "k": whole[1], "v": whole[2], "empty": whole[:0]}, list)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "q": whole[0].tolist(),
        "k": whole[1].tolist(),
        "v": whole[2].tolist(),
        "empty": [],
    }
    assert found["q"].untyped_storage().nbytes() == 16


def test_a_childs_error_is_raised_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    said: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: said.append(text))
    assert child_process.main(full) == 3
    error = child_process.handle_line(said[0])
    assert isinstance(error, DiskFullError)
    assert "model.safetensors" in error.cause


def test_a_failed_child_is_reported_with_its_last_line_of_stderr(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"No module named tgi_cli\.hub\.nothing"):
        child_process.run("tgi_cli.hub.nothing")
