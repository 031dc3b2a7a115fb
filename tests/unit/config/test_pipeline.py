"""``--pipeline-parallel-size`` with other settings, and on each kind of device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.test_resolve import CPU, CUDA, resolved
from tgi_cli.config import ServeConfig, check_settings
from tgi_cli.errors import ConfigError

FOUR = replace(CUDA, count=4)


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        ({"speculate": 3}, "--speculate 3"),
        ({"speculative_config": "{}"}, "--speculative-config"),
        ({"speculative_model": "m"}, "--speculative-model"),
        ({"lora_adapters": ("a=/a",)}, "--lora-adapters"),
        ({"max_loras": 1}, "--max-loras 1"),
        ({"cuda_graphs": (1, 2)}, "--cuda-graphs"),
        ({"kv_cache_dir": Path("/kv")}, "--kv-cache-dir"),
        ({"cross_check": True}, "--cross-check"),
    ],
)
def test_what_stages_are_not_combined_with_is_named(said: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:  # before a process starts or a model is read
        check_settings(ServeConfig(model_id="m", pipeline_parallel_size=2, **said))
    assert caught.value.cause == f"{flag} is not supported with --pipeline-parallel-size 2"


def test_defaults_that_stages_cannot_have_are_off() -> None:
    config = resolved(pipeline_parallel_size=3, speculate=0)
    assert (config.speculate, config.cuda_graphs, config.depth) == (0, (), 2)
    assert resolved(pipeline_parallel_size=2).speculate == 0
    assert resolved(device=FOUR, pipeline_parallel_size=2).cuda_graphs == ()
    assert (resolved().depth, resolved(device=CUDA).depth) == (0, 1)


@pytest.mark.parametrize(
    ("said", "device", "processes"),
    [
        ({"pipeline_parallel_size": 4}, FOUR, 4),
        ({"pipeline_parallel_size": 2, "num_shard": 2}, FOUR, 4),
        ({"pipeline_parallel_size": 2, "sharded": True}, FOUR, 4),
        ({"pipeline_parallel_size": 2}, replace(FOUR, chosen=4), 4),
        ({"pipeline_parallel_size": 2}, FOUR, 2),
        ({"pipeline_parallel_size": 2, "num_shard": 2}, CPU, 4),
    ],
)
def test_each_process_has_a_device(said: dict[str, Any], device: Any, processes: int) -> None:
    assert resolved(device=device, **said).num_processes == processes


def test_processes_without_a_device_or_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes 6 GPUs, and there are 4") as caught:
        resolved(device=FOUR, pipeline_parallel_size=3, num_shard=2)
    assert "--pipeline-parallel-size 3 with --num-shard 2" in caught.value.cause
    with pytest.raises(ConfigError, match="need more memory than this machine"):
        resolved(pipeline_parallel_size=64)


def test_processes_are_named_by_stage_and_shard() -> None:
    config = resolved(pipeline_parallel_size=2, num_shard=2)
    names = [config.process_name(number) for number in range(4)]
    assert names == [
        "shard 0 of stage 1",
        "shard 1 of stage 1",
        "shard 0 of stage 0",
        "shard 1 of stage 0",
    ]
    assert resolved(pipeline_parallel_size=3).process_name(2) == "stage 0"
    assert resolved(num_shard=3).process_name(2) == "shard 2"
