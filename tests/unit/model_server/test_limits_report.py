"""The report of the limits that the user did not set."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi_cli import logging as logs
from tgi_cli.config import DeviceFacts, ModelFacts, ServeConfig, resolve
from tgi_cli.model_server.limits_report import found_limits, log_limits
from tgi_cli.worker.sizing.kv_cache import Capacity

MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="float32",
    vocab_size=1000,
    max_position_embeddings=2048,
    eos_token_ids=(2,),
    kv_bytes_per_token=1024,
)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tgi_cli")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def _found(
    kind: str = "cpu", num_blocks: int = 1000, total: int | None = None, **settings: Any
) -> tuple[ServeConfig, int, Capacity]:
    """As warm-up would find it; ``total``: what it lowered the limits to."""
    serve = ServeConfig(model_id="m", **settings)
    device = DeviceFacts(kind=kind, name="d", total_memory=1 << 34, native_bfloat16=True)
    config = resolve(serve, MODEL, device, Path("/m"))
    context = config.max_total_tokens
    if total is not None:
        config = replace(config, max_total_tokens=total, max_input_tokens=total - 1)
    capacity = Capacity(
        config=config,
        num_blocks=num_blocks,
        cache_bytes=num_blocks * MIB,
        weight_bytes=0,
        activation_bytes=188 * MIB,
        load_seconds=0.0,
        warmup_seconds=0.0,
    )
    return serve, context, capacity


def _report(**given: Any) -> list[str]:
    return [str(limit) for limit in found_limits(*_found(**given))]


def test_defaults_are_reported_with_reasons() -> None:
    assert _report() == [
        "max_total_tokens 2048: the model's context",
        "max_input_tokens 2047: max_total_tokens less one",
        "max_batch_prefill_tokens 512: default on a CPU",
        "max_batch_size 128: max_concurrent_requests",
        "KV cache 1000 blocks of 16 tokens (16000 tokens): "
        "1000.0 MiB, half of 2.0 GiB free after 188.0 MiB of activations",
    ]


def test_states_and_a_batch_that_they_limit_are_reported() -> None:
    serve, context, capacity = _found()
    config = replace(capacity.config, max_batch_size=20)
    capacity = replace(capacity, config=config, num_state_slots=30, state_bytes=3000 * MIB)
    *_, rows, cache = [str(limit) for limit in found_limits(serve, context, capacity)]
    assert rows == "max_batch_size 20: as many recurrent states as 50% of the cache's memory holds"
    assert "1000.0 MiB, and 2.9 GiB for 30 recurrent states, half of 7.8 GiB free" in cache


def test_limits_of_the_user_are_not_reported() -> None:
    assert (
        _report(
            max_input_tokens=10,
            max_total_tokens=20,
            max_batch_prefill_tokens=30,
            max_batch_total_tokens=400,
            max_batch_size=5,
        )
        == []
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"total": 480, "num_blocks": 30}, "max_total_tokens 480: what the KV cache holds"),
        ({"max_batch_total_tokens": 512}, "max_total_tokens 512: max_batch_total_tokens"),
        ({"kind": "cuda"}, "max_batch_prefill_tokens 4096: default"),
        (
            {"batching": "inflight"},
            "max_batch_prefill_tokens 2047: the longest prompt (inflight computes prompts whole)",
        ),
        (
            {"batching": "inflight", "max_batch_prefill_tokens": 300},
            "max_input_tokens 300: max_batch_prefill_tokens (inflight computes prompts whole)",
        ),
        ({"max_batch_size": 5000}, "max_batch_size 4096: the most that can run at once"),
        (
            {"kind": "cuda", "num_blocks": 9216},
            "KV cache 9216 blocks of 16 tokens (147456 tokens): 9.0 GiB, all that is free after "
            "188.0 MiB of activations, less a margin of 5% of the device",
        ),
        (
            {"max_batch_size": 4, "num_blocks": 640},
            "KV cache 640 blocks of 16 tokens (10240 tokens): 640.0 MiB, all that 4 sequences can "
            "use and 25% for prefixes",
        ),
    ],
)
def test_each_limit_has_its_reason(given: dict[str, Any], line: str) -> None:
    assert line in _report(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_waiting_tokens": 0}, "--max-waiting-tokens will be ignored: with --batching fused"),
        (
            {"batching": "static", "waiting_served_ratio": 0.5, "max_waiting_tokens": 3},
            "--waiting-served-ratio and --max-waiting-tokens will be ignored: "
            "with --batching static",
        ),
        (
            {"batching": "inflight", "max_prefill_delay": 50},
            "--max-prefill-delay will be ignored: with --batching inflight no step has both",
        ),
        ({}, ""),
        ({"max_prefill_delay": 50}, ""),
        ({"batching": "inflight", "max_prefill_delay": 0}, ""),
        ({"batching": "inflight", "waiting_served_ratio": 0.5}, ""),
    ],
)
def test_settings_without_effect_are_reported_once(
    given: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="tgi_cli"):
        log_limits(*_found(**given))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(words)
    assert words in "".join(messages)


def test_json_lines_have_name_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("model-server", "INFO", json_output=True)
    log_limits(*_found(json_output=True))
    lines = [json.loads(line)["fields"] for line in capsys.readouterr().err.splitlines()]
    assert {line["limit"]: line["value"] for line in lines} == {
        "max_total_tokens": 2048,
        "max_input_tokens": 2047,
        "max_batch_prefill_tokens": 512,
        "max_batch_size": 128,
        "max_batch_total_tokens": 16000,
    }
    assert lines[0]["message"] == "max_total_tokens 2048: the model's context"


def test_text_lines_have_only_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("model-server", "INFO")
    log_limits(*_found())
    first = capsys.readouterr().err.splitlines()[0]
    assert first.endswith("model-server: max_total_tokens 2048: the model's context")
