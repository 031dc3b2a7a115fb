"""``--num-shard`` and ``--sharded`` together, on each kind of device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.config.test_resolve import CPU, CUDA, resolved
from tgi_cli.errors import ConfigError

FOUR = replace(CUDA, count=4)


@pytest.mark.parametrize(
    ("said", "device", "shards"),
    [
        ({}, CPU, 1),
        ({}, FOUR, 1),
        ({}, replace(FOUR, chosen=3), 3),
        ({}, replace(FOUR, chosen=9), 4),
        ({}, replace(CPU, chosen=3), 1),
        ({"sharded": False}, replace(FOUR, chosen=3), 1),
        ({"num_shard": 2}, replace(FOUR, chosen=3), 2),
        ({"sharded": True}, replace(FOUR, chosen=3), 4),
        ({"sharded": False}, FOUR, 1),
        ({"sharded": False, "num_shard": 1}, FOUR, 1),
        ({"sharded": True}, FOUR, 4),
        ({"sharded": True, "num_shard": 2}, FOUR, 2),
        ({"num_shard": 3}, FOUR, 3),
        ({"num_shard": 1}, CPU, 1),
        ({"num_shard": 2}, CPU, 2),
        ({"sharded": True, "num_shard": 2}, CPU, 2),
    ],
)
def test_the_number_of_shards_follows_flags_and_devices(
    said: dict[str, Any], device: Any, shards: int
) -> None:
    assert resolved(device=device, **said).num_shard == shards


@pytest.mark.parametrize(
    ("said", "device", "cause", "remedy"),
    [
        ({"num_shard": 5}, FOUR, "--num-shard 5 is more than", "at most 4"),
        ({"num_shard": 2}, CUDA, "--num-shard 2 is more than", "at most 1"),
        ({"sharded": True}, CUDA, "there is only one", "leave it off"),
        ({"sharded": True}, CPU, "this machine has none", "--num-shard N"),
        ({"sharded": True, "num_shard": 1}, FOUR, "--sharded and --num-shard 1", "leave one off"),
        ({"sharded": False, "num_shard": 2}, FOUR, "--no-sharded", "leave one off"),
        ({"num_shard": 0}, CPU, "--num-shard: 0 is not at least 1", ""),
    ],
)
def test_contradictory_sharding_is_rejected(
    said: dict[str, Any], device: Any, cause: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(device=device, **said)
    assert cause in caught.value.cause
    assert remedy in caught.value.remedy
