from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.tools.hub_server import HubServer
from tgi_cli.hub import client

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()


def weights(seed: int = 0, size: int = 50_000) -> bytes:
    """A safetensors file of some 200 kB."""
    values = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    return save({f"w{seed}": values})


def model(**extra: bytes) -> dict[str, bytes]:
    """A repository with one weight file; keyword names have ``__`` for a dot."""
    files = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": weights()}
    return files | {name.replace("__", "."): data for name, data in extra.items()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running stand-in that the environment points to, with an empty cache and no token."""
    for name in ("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(client, "INITIAL_DELAY", 0.01)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What servers asked to wait; nobody waits."""
    asked_for: list[float | None] = []

    def wait_before(attempt: int, asked: float | None) -> float:
        asked_for.append(asked)
        return 0.0

    monkeypatch.setattr(client, "retry_delay", wait_before)
    return asked_for


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[dict[str, bytes]], Path]:
    """Writes files into a folder of the user's."""

    def write(files: dict[str, bytes]) -> Path:
        place = tmp_path / "a-model"
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(data)
        return place

    return write
