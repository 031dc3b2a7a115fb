"""From what the user said to a fully specified engine."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.config import DeviceFacts, EngineConfig, ModelFacts, ServeConfig, resolve
from tgi_cli.errors import ConfigError, ExitCode

MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="bfloat16",
    vocab_size=1000,
    max_position_embeddings=2048,
    eos_token_ids=(2,),
    kv_bytes_per_token=1024,
)
CPU = DeviceFacts(kind="cpu", name="cpu", total_memory=8 << 30, native_bfloat16=True)
CUDA = DeviceFacts(kind="cuda", name="gpu", total_memory=80 << 30, native_bfloat16=True)


def resolved(model: ModelFacts = MODEL, device: DeviceFacts = CPU, **said: Any) -> EngineConfig:
    return resolve(ServeConfig(model_id="m", **said), model, device, Path("/m"))


def test_what_was_left_open_follows_the_model() -> None:
    config = resolved()
    assert config.max_total_tokens == 2048
    assert config.max_input_tokens == 2047
    assert config.max_batch_size == 128
    assert config.max_batch_total_tokens is None, "found at warm-up"


def test_both_configurations_are_frozen() -> None:
    config = resolved()
    with pytest.raises(FrozenInstanceError):
        config.max_total_tokens = 1  # type: ignore[misc]
    assert all(field.default is not None or field.init for field in fields(EngineConfig))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"max_total_tokens": 100}, (99, 100)),
        ({"max_input_tokens": 50}, (50, 2048)),
        ({"max_input_tokens": 50, "max_total_tokens": 60}, (50, 60)),
        ({"max_batch_total_tokens": 512}, (511, 512)),
        ({"max_batch_total_tokens": 4096}, (2047, 2048)),
    ],
)
def test_limits_that_were_said_are_kept(said: dict[str, int], expected: tuple[int, int]) -> None:
    config = resolved(**said)
    assert (config.max_input_tokens, config.max_total_tokens) == expected


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"max_total_tokens": 4096}, "context of 2048"),
        ({"max_total_tokens": 1}, "at least 2"),
        ({"max_input_tokens": 100, "max_total_tokens": 100}, "must be less than"),
        ({"max_input_tokens": 2048}, "must be less than"),
        ({"max_batch_total_tokens": 100, "max_total_tokens": 200}, "cannot hold one request"),
        ({"max_batch_prefill_tokens": 600, "max_batch_total_tokens": 512}, "at most"),
        ({"max_batch_size": 0}, "--max-batch-size 0 must be positive"),
        ({"max_concurrent_requests": -1}, "--max-concurrent-requests -1 must be positive"),
        ({"dtype": "int3"}, "int3"),
    ],
)
def test_what_cannot_be_is_refused_in_the_users_words(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolved(**said)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("said", "device", "on_disk", "expected"),
    [
        (None, CPU, "float16", "bfloat16"),
        (None, CPU, "float32", "bfloat16"),
        (None, replace(CPU, native_bfloat16=False), "bfloat16", "float32"),
        (None, CUDA, "float16", "float16"),
        (None, CUDA, "float32", "bfloat16"),
        ("float32", CUDA, "bfloat16", "float32"),
        ("half", CPU, "bfloat16", "float16"),
        ("auto", CUDA, "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_follows_the_flag_then_the_device(
    said: str | None, device: DeviceFacts, on_disk: str, expected: str
) -> None:
    config = resolved(replace(MODEL, dtype=on_disk), device, dtype=said)
    assert config.dtype == expected
