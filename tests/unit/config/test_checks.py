"""Contradictions that are found before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tgi_cli.config import ServeConfig, check_settings
from tgi_cli.errors import ConfigError, UnsupportedModelError


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (
            {"max_input_tokens": 10, "max_total_tokens": 5},
            ("--max-input-tokens 10", "--max-total-tokens 5"),
        ),
        (
            {"max_input_tokens": 5, "max_total_tokens": 5},
            ("--max-input-tokens 5", "--max-total-tokens 5"),
        ),
        (
            {"max_total_tokens": 100, "max_batch_total_tokens": 64},
            ("--max-total-tokens 100", "--max-batch-total-tokens 64"),
        ),
        (
            {"max_input_tokens": 64, "max_batch_total_tokens": 64},
            ("--max-input-tokens 64", "--max-batch-total-tokens 64"),
        ),
        (
            {"max_batch_prefill_tokens": 100, "max_batch_total_tokens": 64},
            ("--max-batch-prefill-tokens 100", "--max-batch-total-tokens 64"),
        ),
        (
            {"batching": "inflight", "max_batch_prefill_tokens": 5, "max_input_tokens": 6},
            ("--max-batch-prefill-tokens", "--max-input-tokens", "5 and 6"),
        ),
        ({"sharded": False, "num_shard": 2}, ("--no-sharded", "--num-shard 2")),
        ({"sharded": True, "num_shard": 1}, ("--sharded", "--num-shard 1")),
        (
            {"disable_custom_kernels": True, "attention": "native"},
            ("--attention native", "--disable-custom-kernels"),
        ),
        (
            {"disable_custom_kernels": True, "state_prefill": "chunked"},
            ("--state-prefill chunked", "--disable-custom-kernels"),
        ),
        ({"kv_cache_dir_size": 1 << 30}, ("--kv-cache-dir-size",)),
        ({"cross_check": True, "load_format": "dummy"}, ("--cross-check", "--load-format dummy")),
        ({"cross_check": True, "rope_factor": 2.0}, ("--cross-check", "--rope-scaling")),
    ],
)
def test_contradictory_settings_are_named_as_flags(
    settings: dict[str, Any], flags: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(ServeConfig(model_id="m", **settings))
    assert all(flag in caught.value.cause for flag in flags)
    assert caught.value.remedy


def test_exl2_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="exl2"):
        check_settings(ServeConfig(model_id="m", quantize="exl2"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_input_tokens": 4, "max_total_tokens": 5, "max_batch_total_tokens": 5},
        {"max_input_tokens": 4, "max_batch_total_tokens": 5, "max_batch_prefill_tokens": 5},
        {"batching": "inflight", "max_batch_prefill_tokens": 6, "max_input_tokens": 6},
        {"sharded": True},
        {"disable_custom_kernels": True, "attention": "torch"},
    ],
)
def test_possible_settings_pass(settings: dict[str, Any]) -> None:
    check_settings(ServeConfig(model_id="m", **settings))
