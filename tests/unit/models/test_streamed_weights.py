"""Weights that are read from a URL as they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.tools.hub_server import Cut, IgnoreRange, Refuse
from tests.tools.store_server import StoreServer
from tgi_cli.errors import ConfigError, HubError, ModelError, OfflineError
from tgi_cli.hub.resolve import resolve_model
from tgi_cli.hub.streamed_model import MARKER
from tgi_cli.models import load_model, read_config, tensor_readers
from tgi_cli.models.checkpoint import read_headers, read_tensor

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A web server with a model of three files at ``/bucket/m``."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr("tgi_cli.hub.client.INITIAL_DELAY", 0.01)
    make_llama(tmp_path / "m", files=3)
    with StoreServer() as server:
        files = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
        server.put_folder("bucket", "m", files)
        yield server


def stream(store: StoreServer) -> Path:
    return resolve_model(f"{store.url}/bucket/m", stream=True).path


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) == 3
    return found


def test_a_streamed_model_is_the_same_and_has_no_copy_on_the_disk(
    store: StoreServer, tmp_path: Path
) -> None:
    folder = stream(store)
    store.seen.clear()
    expected = dict(load_model(read_config(tmp_path / "m"), torch.float32, CPU).named_parameters())
    found = dict(load_model(read_config(folder), torch.float32, CPU).named_parameters())
    assert set(found) == set(expected)
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
    headers = 100_000
    for path in shards(folder):
        assert path.stat().st_blocks * 512 < headers < path.stat().st_size
    sizes = sum(path.stat().st_size for path in shards(folder))
    assert sum(seen.sent for seen in store.seen) <= sizes, "nothing is read twice"


def test_cut_connections_are_taken_up_again(
    store: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_readers, "_THREADS", 1)
    folder = stream(store)
    keys = [f"m/{path.name}" for path in shards(folder)]
    for key in keys:
        for fault in (Cut(100), Refuse(503), Cut(7)):
            store.fault(key, fault)
    store.seen.clear()
    expected, found = (
        dict(load_model(read_config(path), torch.float32, CPU).named_parameters())
        for path in (tmp_path / "m", folder)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    sizes = sum(path.stat().st_size for path in shards(folder))
    assert sum(seen.sent for seen in store.seen) <= sizes
    store.fault(keys[0], Refuse(503), times=100)
    with pytest.raises(OfflineError, match="cannot read"):
        load_model(read_config(folder), torch.float32, CPU)


def test_single_tensors_and_rows_are_read(store: StoreServer, tmp_path: Path) -> None:
    here, there = read_headers(tmp_path / "m"), read_headers(stream(store))
    for name in list(here)[:5]:
        assert torch.equal(read_tensor(here[name]), read_tensor(there[name]))


def test_a_replaced_file_is_not_mixed_with_the_old_one(store: StoreServer) -> None:
    folder = stream(store)
    key = f"m/{shards(folder)[1].name}"
    data = store.buckets["bucket"][key].data
    store.put("bucket", key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(HubError, match="has changed"):
        load_model(read_config(folder), torch.float32, CPU)
    assert stream(store) != folder, "another version has another folder"


def test_a_folder_is_made_once(store: StoreServer) -> None:
    folder = stream(store)
    assert (folder / MARKER).is_file()
    store.seen.clear()
    assert stream(store) == folder
    assert store.fetched() <= {"m/model.safetensors.index.json"}, "it tells the files"


def test_what_cannot_be_streamed_is_refused(store: StoreServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not one"):
        resolve_model(str(tmp_path / "m"), stream=True)
    for path in shards(tmp_path / "m"):
        store.fault(f"m/{path.name}", IgnoreRange(), times=3)
    with pytest.raises(ModelError, match="does not send ranges"):
        stream(store)
    store.put("bucket", "g/model-Q8_0.gguf", b"GGUF")
    with pytest.raises(ConfigError, match="reads safetensors"):
        resolve_model(f"{store.url}/bucket/g/model-Q8_0.gguf", stream=True)
