"""A finished checkpoint goes to the hub; gptqmodel is called where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import huggingface_hub
import pytest

from tgi_cli import demo
from tgi_cli.errors import ConfigError, GatedModelError, HubError, OfflineError
from tgi_cli.quantization.algorithms.recipe import Recipe
from tgi_cli.quantize import gptqmodel
from tgi_cli.quantize.command import check_upload, upload
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.quantize.pipeline import QuantizeJob


class Api:
    """Stands in for the hub's."""

    calls: list[tuple[str, dict[str, Any]]]
    error: Exception | None = None

    def __init__(self, **options: Any) -> None:
        Api.calls = [("made", options)]

    def create_repo(self, name: str, **options: Any) -> str:
        Api.calls.append((name, options))
        return f"https://hub/{name}"

    def upload_folder(self, **options: Any) -> None:
        if Api.error is not None:
            raise Api.error
        Api.calls.append(("upload", options))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[Api]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(Api, "error", None)
    return Api


def test_upload(api: type[Api], tmp_path: Path) -> None:
    assert upload(tmp_path, "me/model") == "https://hub/me/model"
    made, repository, sent = api.calls
    assert made[1] == {"endpoint": "http://hub", "token": "hf_x"}
    assert repository == ("me/model", {"exist_ok": True})
    assert sent[1]["repo_id"] == "me/model"
    assert sent[1]["folder_path"] == tmp_path


def test_impossible_uploads_are_refused_before_quantizing(
    api: type[Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_upload("me/model")
    with pytest.raises(ConfigError, match="not a valid model id"):
        check_upload("me/my/model")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(GatedModelError, match="requires a token"):
        check_upload("me/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError):
        check_upload("me/model")


def test_a_failed_upload_names_the_complete_checkpoint(
    api: type[Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "error", httpx.ConnectError("gone"))
    with pytest.raises(HubError, match="cannot be reached") as raised:
        upload(tmp_path, "me/model")
    assert f"hf upload me/model {tmp_path}" in raised.value.remedy


def _job(tmp_path: Path, recipe: dict[str, Any] | None = None, **options: Any) -> QuantizeJob:
    model = demo.model_path()
    return QuantizeJob(
        model,
        tmp_path / "out",
        Recipe(method="gptq", **recipe or {}),
        QuantizeOptions(
            model_id=str(model), calibration="bundled", samples=3, seq_len=32, **options
        ),
    )


def test_a_missing_gptqmodel_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptqmodel, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="gptqmodel is not installed") as raised:
        gptqmodel.quantize(_job(tmp_path))
    assert "--backend builtin" in raised.value.remedy


def test_gptqmodel_is_called_with_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Config:
        def __init__(self, **settings: Any) -> None:
            seen["settings"] = settings

    class Model:
        @classmethod
        def load(cls, path: str, config: Config, **options: Any) -> Model:
            seen["path"] = path
            return cls()

        def quantize(self, rows: list[dict[str, Any]], batch_size: int) -> None:
            seen["rows"] = rows

        def save(self, path: str) -> None:
            Path(path).mkdir()
            (Path(path) / "model.safetensors").write_bytes(b"12345")

    library = ModuleType("gptqmodel")
    library.GPTQModel = Model  # type: ignore[attr-defined]
    library.QuantizeConfig = Config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gptqmodel", library)
    monkeypatch.setattr(gptqmodel, "find_spec", lambda _: library)
    options = {"bits": 8, "group_size": 32, "desc_act": True, "group_aware": False}
    outcome = gptqmodel.quantize(_job(tmp_path, recipe=options, exclude=("*.q_proj",)))
    assert outcome.num_bytes == 5
    assert seen["path"] == str(demo.model_path())
    assert [row["input_ids"].shape for row in seen["rows"]] == [(1, 32)] * 3
    assert seen["settings"].items() >= {"bits": 8, "group_size": 32, "desc_act": True}.items()
    [rule] = seen["settings"]["dynamic"]
    assert rule.startswith("-:")
    with pytest.raises(ConfigError, match="--resume"):
        gptqmodel.quantize(_job(tmp_path / "other", resume=True))
