"""What ``--lora-adapters`` may say, and the folders that come of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from tests.tools.hub_server import HubServer
from tests.unit.hub.conftest import CONFIG, model
from tgi_cli.errors import (
    ConfigError,
    CorruptFileError,
    ModelError,
    ModelNotFoundError,
    OfflineError,
)
from tgi_cli.hub.lora_files import (
    LocalAdapter,
    base_model_of,
    is_same_base,
    resolve_adapter,
    resolve_adapters,
    split_revision,
)

TENSORS = {"base_model.model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 4)}
FILES = {
    "adapter_config.json": json.dumps(
        {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2}
    ).encode(),
    "adapter_model.safetensors": save(TENSORS),
}


def write(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_the_forms_of_adapters_are_parsed(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("org/one", FILES, revisions={"main", "v2"})
    here = write(tmp_path / "here")
    odd = write(tmp_path / "a@b=c")
    monkeypatch.chdir(tmp_path)
    found = resolve_adapters(
        ["org/one", "second=org/one@v2", "third=here", f"fourth={here}", "fifth=a@b=c"], "org/base"
    )
    assert [adapter.name for adapter in found] == ["org/one", "second", "third", "fourth", "fifth"]
    assert found[0].path == found[1].path
    assert found[0].path.name == commit
    assert [adapter.path for adapter in found[2:]] == [here, here, odd]
    assert str(found[2]) == f"third={here}"
    # What the launcher passes on is understood as it is.
    assert resolve_adapters(list(map(str, found)), "org/base") == found


def test_a_revision_is_no_part_of_the_name(hub: HubServer) -> None:
    hub.add("org/one", FILES, revisions={"refs/pr/1"})
    (found,) = resolve_adapters(["org/one@refs/pr/1"], "org/base")
    assert found.name == "org/one"


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (["a=/x", "a=/y"], "'a' twice"),
        (["a" * 100_000 + "=/x"], "name has 100000 characters, and may have 256"),
        (["=x"], "'=x' is not an adapter"),
        (["a="], "'a=' is not an adapter"),
        (["org/one@"], "'org/one@' is not an adapter"),
        (["org/base"], "'org/base' is the name of the base model"),
        (["tgi=org/one"], "'tgi' is the name of the base model"),
        (["my adapter=org/one"], "'my adapter' cannot be the name"),
    ],
)
def test_a_repository_without_an_adapter_is_refused_before_any_download(
    hub: HubServer, items: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_adapters(items, "org/base")
    assert caught.value.remedy
    assert hub.fetched() == set()


def test_a_model_is_not_an_adapter_and_is_not_fetched(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/model", model())
    with pytest.raises(ModelError, match="org/model is not an adapter") as caught:
        resolve_adapters(["org/model"], "org/base")
    assert "save_pretrained" in caught.value.remedy
    assert hub.fetched() == set()
    with pytest.raises(ModelError, match="is not an adapter"):
        resolve_adapters([f"a={write(tmp_path / 'm', {'config.json': CONFIG})}"], "org/base")


def test_missing_adapters_are_not_found(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="org/none"):
        resolve_adapter("org/none")
    with pytest.raises(ModelNotFoundError, match=f"there is no folder {tmp_path}/none"):
        resolve_adapter(f"{tmp_path}/none")
    with pytest.raises(ModelNotFoundError, match=r"there is no folder \./none"):
        resolve_adapter("./none")
    half = write(tmp_path / "half", {"adapter_config.json": b"{}"})
    with pytest.raises(ModelError, match="no adapter weights"):
        resolve_adapter(str(half))
    cut = write(tmp_path / "cut", FILES | {"adapter_model.safetensors": save(TENSORS)[:-4]})
    with pytest.raises(CorruptFileError, match="truncated"):
        resolve_adapter(str(cut))


def test_only_an_adapters_files_are_fetched_and_found_offline(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/one", FILES | {"optimizer.pt": b"no", "README.md": b"no"})
    online = resolve_adapter("org/one")
    assert hub.fetched() == set(FILES)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_adapter("org/one") == online
    with pytest.raises(OfflineError):
        resolve_adapter("org/two")


def test_relative_paths_are_refused_with_absolute(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path of a client is an id of the hub, or nothing."""
    folder = write(tmp_path / "org" / "one")
    monkeypatch.chdir(tmp_path)
    assert resolve_adapter("org/one") == folder
    with pytest.raises(ModelNotFoundError):
        resolve_adapter("org/one", absolute=True)
    for source in ("../one", "./org/one", "~/one", "org/one/"):
        with pytest.raises(ModelNotFoundError, match="no folder"):
            resolve_adapter(source, absolute=True)
    assert resolve_adapter(str(folder), absolute=True) == folder


def test_a_pickle_is_converted(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"adapter_config.json": FILES["adapter_config.json"]})
    torch.save(TENSORS, folder / "adapter_model.bin")
    assert resolve_adapter(str(folder)) == folder
    converted = load_file(folder / "adapter_model.safetensors")
    assert converted.keys() == TENSORS.keys()


def test_the_base_of_an_adapter_is_compared_by_name(tmp_path: Path) -> None:
    assert base_model_of(write(tmp_path / "a")) == "org/base"
    assert is_same_base("org/Base", "/models/base")
    assert is_same_base("", "org/other")
    assert not is_same_base("org/base", "org/other")


def test_a_path_with_a_comma_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a,b" / "c")
    with pytest.raises(ConfigError, match="comma"):
        resolve_adapters([f"a={tmp_path}/a,b/c"], "org/base")


def test_revisions() -> None:
    assert split_revision("org/a@v1") == ("org/a", "v1")
    assert split_revision("org/a") == ("org/a", None)
    assert split_revision("/data/a@b") == ("/data/a@b", None)
    assert str(LocalAdapter("a", Path("/b"))) == "a=/b"
