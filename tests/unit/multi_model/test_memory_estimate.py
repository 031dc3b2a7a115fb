"""Estimates of memory from files, and the file of models."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tgi_cli.config.settings.models_file import read_models
from tgi_cli.errors import ConfigError
from tgi_cli.multi_model.memory_estimate import PROCESS_BYTES, estimate_memory
from tgi_cli.multi_model.model_scheduler import ScheduledModel

CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 100,
}
PER_TOKEN = 2 * 4 * 2 * 8 * 2


def model(folder: Path, config: object = CONFIG) -> Path:
    (folder / "a.safetensors").write_bytes(b"x" * 700)
    (folder / "b.safetensors").write_bytes(b"x" * 300)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 5000)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_files_cache_and_processes(tmp_path: Path) -> None:
    path = model(tmp_path)
    assert estimate_memory(path, None) == 1000 + 100 * PER_TOKEN + PROCESS_BYTES
    assert estimate_memory(path, 7) == 1000 + 7 * PER_TOKEN + PROCESS_BYTES


def test_the_text_part_of_a_model_counts(tmp_path: Path) -> None:
    path = model(tmp_path, {"text_config": {**CONFIG, "head_dim": 16}, **CONFIG})
    assert estimate_memory(path, 1) == 1000 + 2 * PER_TOKEN + PROCESS_BYTES


@pytest.mark.parametrize("config", [{}, [], {**CONFIG, "hidden_size": "wide"}])
def test_unknown_configurations_count_as_a_share_of_the_weights(
    tmp_path: Path, config: object
) -> None:
    assert estimate_memory(model(tmp_path, config), None) == 1250 + PROCESS_BYTES


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_absurd_numbers_are_bounded(tmp_path: Path, name: str) -> None:
    """Those of the list of models are JSON, and expected times are floats."""
    memory = estimate_memory(model(tmp_path, {**CONFIG, name: 10**900}), None)
    assert msgspec.json.decode(msgspec.json.encode(memory)) == memory
    found = ScheduledModel(name="a", memory=memory)
    assert found.expected_load_seconds > 1000


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x" * 4000)
    assert estimate_memory(file, None) == 5000 + PROCESS_BYTES


def test_a_file_of_models(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("a:\n  model: ./a\n  max-total-tokens: 64\nb:\n")
    found = read_models(file, {"port"})
    assert found == {"a": {"model": "./a", "max_total_tokens": "64"}, "b": {}}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "has 0 models"),
        ("a: x\n", "not a section"),
        ("a:\n  port: 3\n", "'port' is not a setting"),
        ("a:\n  max-total-tokens: many\n", "not a whole number"),
    ],
)
def test_what_a_file_cannot_have(tmp_path: Path, text: str, cause: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=cause):
        read_models(file, {"port"})
