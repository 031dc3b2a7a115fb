"""``--nnodes`` with other settings, and how processes are divided among nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.test_resolve import CPU, CUDA, resolved
from tgi_cli.config import ServeConfig, check_settings
from tgi_cli.errors import ConfigError

TWO = replace(CUDA, count=2)
FILE = Path("/secret")


def check(**said: Any) -> None:
    check_settings(ServeConfig(model_id="m", **said))


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ({"nnodes": 1, "node_rank": 1}, "--node-rank 1 is for several nodes"),
        ({"nnodes": 1}, "--node-secret-file is for several nodes"),
        ({"node_rank": 2}, "--node-rank 2 with --nnodes 2: nodes are numbered from 0 to 1"),
        ({"node_secret_file": None}, "--nnodes 2 needs a secret by which the nodes"),
        ({"master_port": 0}, "--master-port 0: the other nodes have to know it"),
        ({"lora_adapters": ("a=/a",)}, "--lora-adapters is not supported with --nnodes 2"),
        ({"max_loras": 1}, "--max-loras 1 is not supported with --nnodes 2"),
        ({"num_shard": 3}, "3 processes cannot be divided evenly among --nnodes 2"),
    ],
)
def test_contradictions_are_named(said: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**{"nnodes": 2, "node_secret_file": FILE} | said)
    assert caught.value.cause.startswith(cause)


@pytest.mark.parametrize(
    ("said", "device", "shards"),
    [
        ({"pipeline_parallel_size": 2}, CPU, 1),
        ({"num_shard": 2}, CPU, 2),
        ({"num_shard": 4}, TWO, 4),
        ({}, TWO, 2),
        ({"pipeline_parallel_size": 2, "num_shard": 2}, TWO, 2),
        ({"pipeline_parallel_size": 2, "sharded": True}, TWO, 2),
        ({"pipeline_parallel_size": 2}, replace(TWO, chosen=2), 2),
    ],
)
def test_each_node_has_the_devices(said: dict[str, Any], device: Any, shards: int) -> None:
    config = resolved(device=device, nnodes=2, node_secret_file=FILE, **said)
    assert config.num_shard == shards
    assert config.local_processes == config.num_processes // 2


def test_what_no_node_has_is_refused() -> None:
    said: dict[str, Any] = {"nnodes": 2, "node_secret_file": FILE}
    with pytest.raises(ConfigError, match="takes 4 GPUs on each, and there are 2"):
        resolved(device=TWO, pipeline_parallel_size=4, num_shard=2, **said)
    with pytest.raises(ConfigError, match="1 process cannot be divided evenly"):
        resolved(**said)


def test_processes_are_named_with_their_nodes() -> None:
    config = resolved(pipeline_parallel_size=4, num_shard=2, nnodes=2, node_secret_file=FILE)
    names = [config.process_name(number) for number in range(8)]
    assert names[0] == "shard 0 of stage 3 on node 0"
    assert names[3:5] == ["shard 1 of stage 2 on node 0", "shard 0 of stage 1 on node 1"]
    assert [config.device_index(number) for number in range(8)] == [0, 1, 2, 3] * 2
    assert [config.stages_on(node) for node in range(2)] == [
        ["stage 2", "stage 3"],
        ["stage 0", "stage 1"],
    ]
    config = resolved(num_shard=2, nnodes=2, node_secret_file=FILE)
    assert config.process_name(1) == "shard 1 on node 1"
    assert config.stages_on(1) == ["shard 1"]
