"""What is kept of a warm-up, for whom it counts, and what a later start does with it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.config import EngineConfig, ServeConfig
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.sizing import kv_cache, saved_profile
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.sizing.saved_profile import SavedProfile
from tgi_cli.worker.worker import ModelWorker

SAID: dict[str, Any] = {"dtype": "float32", "max_batch_prefill_tokens": 64, "max_batch_size": 4}
FOUND = SavedProfile(activation_bytes=5, graphs=True, step_seconds=0.5, max_total_tokens=100)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tgi" / "limits"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "llama")


@pytest.fixture
def config(model: Path) -> EngineConfig:
    return replace(CONFIG, device="cpu", model_path=model)


def test_a_saved_profile_is_loaded_unchanged(config: EngineConfig, cache: Path) -> None:
    key = saved_profile.key_of(replace(config, cuda_graphs=(1, 2)))
    assert saved_profile.load(key) is None
    path = saved_profile.save(key, FOUND)
    assert path.parent == cache
    found = saved_profile.load(key)
    assert found is not None
    assert found.when > 0
    assert replace_when(found) == FOUND
    assert list(cache.iterdir()) == [path], "nothing half-written stays"


def replace_when(found: SavedProfile) -> SavedProfile:
    return SavedProfile(
        activation_bytes=found.activation_bytes,
        graphs=found.graphs,
        step_seconds=found.step_seconds,
        max_total_tokens=found.max_total_tokens,
    )


def test_the_same_model_under_another_name_is_the_same(
    config: EngineConfig, tmp_path: Path
) -> None:
    key = saved_profile.key_of(config)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(config.model_path)
    assert saved_profile.key_of(replace(config, model_id="x", revision="y")) == key
    assert saved_profile.key_of(replace(config, model_path=elsewhere)) == key


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "float8_e5m2"},
        {"quantize": "int8"},
        {"quantize_head": True},
        {"quantize_activations": True},
        {"quantize_head_bits": 4},
        {"max_batch_size": 1000},
        {"max_total_tokens": 37},
        {"max_batch_prefill_tokens": 37},
        {"max_loras": 1},
        {"num_shard": 2},
        {"attention": "torch"},
        {"cuda_graphs": (1,)},
    ],
)
def test_other_settings_have_figures_of_their_own(
    config: EngineConfig, changed: dict[str, Any]
) -> None:
    saved_profile.save(saved_profile.key_of(config), FOUND)
    assert saved_profile.load(saved_profile.key_of(config)) is not None
    assert saved_profile.load(saved_profile.key_of(replace(config, **changed))) is None


@pytest.mark.parametrize("what", ["weights", "config", "torch", "threads", "memory"])
def test_changed_files_and_devices_invalidate_a_profile(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    saved_profile.save(saved_profile.key_of(config), FOUND)
    match what:
        case "weights":
            (weights,) = config.model_path.glob("*.safetensors")
            os.utime(weights, (1, 1))
        case "config":
            path = config.model_path / "config.json"
            path.write_text(path.read_text() + "\n")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "1.0")
        case "threads":
            monkeypatch.setattr(saved_profile, "default_threads", lambda: 1000)
        case "memory":
            monkeypatch.setattr("tgi_cli.device.facts.total_memory", lambda device: 1)
    assert saved_profile.load(saved_profile.key_of(config)) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": {}, "measured": {"x": 1}}'])
def test_a_file_that_cannot_be_read_counts_as_none(
    config: EngineConfig, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    key = saved_profile.key_of(config)
    saved_profile.save(key, FOUND).write_bytes(content)
    assert saved_profile.load(key) is None
    assert "cannot be read" in caplog.text


def test_a_file_of_another_key_counts_as_none(config: EngineConfig) -> None:
    key, other = saved_profile.key_of(config), saved_profile.key_of(replace(config, max_loras=1))
    saved_profile.path_of(other)
    content = saved_profile.save(key, FOUND).read_bytes()
    saved_profile.path_of(other).write_bytes(content)
    assert saved_profile.load(other) is None


# --------------------------------------------------------------------------- a later start


def warmed(model: Path, **said: Any) -> tuple[ModelWorker, EngineConfig, Capacity]:
    worker, config = load_worker(ServeConfig(model_id="tiny", **{**SAID, **said}), model)
    assert isinstance(worker, ModelWorker)
    return worker, config, worker.warmup()


def refuse_the_worst(*_: object) -> Any:
    raise AssertionError("the worst steps are run")


def test_a_later_start_with_a_saved_profile_runs_no_worst_step(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, config, first = warmed(model)
    path = saved_profile.save(saved_profile.key_of(config), first.profile)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kv_cache, "worst_steps", refuse_the_worst)
    _, _, later = warmed(model)
    assert later.activation_bytes == first.activation_bytes
    assert later.step_seconds == first.step_seconds > 0
    assert (later.num_blocks, later.config) == (first.num_blocks, first.config)
    assert "limits as `tgi warmup` measured them on 20" in caplog.text
    with pytest.raises(AssertionError, match="are run"):
        warmed(model, measured_limits=False)
    with pytest.raises(AssertionError, match="are run"):
        warmed(model, max_batch_prefill_tokens=63)
    path.unlink()
    with pytest.raises(AssertionError, match="are run"):
        warmed(model)


@pytest.mark.parametrize("promised", [None, 512])
def test_too_little_memory_is_measured_anew(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    promised: int | None,
) -> None:
    worker, config, first = warmed(model, max_total_tokens=promised)
    saved_profile.save(saved_profile.key_of(config), first.profile)
    caplog.set_level(logging.INFO)
    block_bytes = worker.attention.block_bytes
    monkeypatch.setattr(kv_cache, "cache_budget", lambda *_: 10 * block_bytes)
    monkeypatch.setattr(kv_cache, "worst_steps", refuse_the_worst)
    with pytest.raises(AssertionError, match="are run"):
        warmed(model, max_total_tokens=promised)
    assert "there is less memory than on 20" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(kv_cache, "cache_budget", lambda *_: 10 * block_bytes)
    if promised is None:
        assert warmed(model)[2].config.max_total_tokens == 160
    else:
        with pytest.raises(OutOfMemoryError, match="KV cache"):
            warmed(model, max_total_tokens=promised)
