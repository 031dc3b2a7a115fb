"""How cores and GPUs are divided among replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tgi_cli.config import DeviceFacts, ServeConfig
from tgi_cli.errors import ConfigError
from tgi_cli.launcher import placement
from tgi_cli.launcher.placement import GPUS, Placement, place_replicas
from tgi_cli.process.cores import Core

CORES = [
    Core(socket, (first, first + 8))
    for socket in (0, 1)
    for first in range(4 * socket, 4 * socket + 4)
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have torch see so many GPUs, or none."""

    def see(gpus: int = 0, chosen: int | None = None) -> None:
        facts = DeviceFacts(
            kind="cuda" if gpus else "cpu",
            name="",
            total_memory=1,
            native_bfloat16=True,
            count=gpus or 1,
            chosen=chosen,
        )
        monkeypatch.setattr(placement, "_may_have_gpus", lambda: True)
        monkeypatch.setattr(placement, "run_in_fork", lambda _work: facts)
        monkeypatch.setattr(placement, "usable_cores", lambda: CORES)

    monkeypatch.delenv(GPUS, raising=False)
    see()
    return see


def serve(replicas: int, num_shard: int | None = None, sharded: bool | None = None) -> ServeConfig:
    return ServeConfig(model_id="", replicas=replicas, num_shard=num_shard, sharded=sharded)


def test_one_model_server_runs_anywhere() -> None:
    assert place_replicas(serve(1)) == [Placement()]


def test_replicas_get_equal_parts_of_the_cores(device: Callable[..., None]) -> None:
    found = place_replicas(serve(2))
    assert found == [
        Placement(cpus=(0, 1, 2, 3, 8, 9, 10, 11)),
        Placement(cpus=(4, 5, 6, 7, 12, 13, 14, 15)),
    ]
    assert [str(each) for each in found] == ["CPU 0-3,8-11", "CPU 4-7,12-15"]
    assert found[0].variables == {}


@pytest.mark.parametrize("replicas", [3, 5, 8])
def test_every_core_belongs_to_one_replica(device: Callable[..., None], replicas: int) -> None:
    found = place_replicas(serve(replicas))
    assert sorted(cpu for each in found for cpu in each.cpus) == list(range(16))
    sizes = [len(each.cpus) // 2 for each in found]
    assert max(sizes) - min(sizes) <= 1


def test_more_replicas_than_cores_share_all(
    device: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    assert place_replicas(serve(9)) == [Placement()] * 9
    assert "9 replicas share 8 cores: they compute in turns" in caplog.text


@pytest.mark.parametrize(
    ("visible", "chosen", "config", "expected"),
    [
        (None, None, serve(2), ["0", "1"]),
        (None, None, serve(2, num_shard=2), ["0,1", "2,3"]),
        (None, None, serve(2, sharded=True), ["0,1", "2,3"]),
        (None, None, replace(serve(2), pipeline_parallel_size=2), ["0,1", "2,3"]),
        ("4,5,6,7", 4, serve(2), ["4,5", "6,7"]),
        ("4,5,6,7", 4, serve(4), ["4", "5", "6", "7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", 4, serve(2, sharded=False), ["GPU-a", "GPU-b"]),
        ("all", 4, serve(4), ["0", "1", "2", "3"]),
    ],
)
def test_gpus_are_divided_in_groups_of_shards(
    device: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    chosen: int | None,
    config: ServeConfig,
    expected: list[str],
) -> None:
    device(gpus=4, chosen=chosen)
    if visible is not None:
        monkeypatch.setenv(GPUS, visible)
    found = place_replicas(config)
    assert [each.gpus for each in found] == expected
    assert found[0].variables == {GPUS: expected[0]}


def test_too_few_gpus_are_an_error(device: Callable[..., None]) -> None:
    device(gpus=4)
    with pytest.raises(ConfigError, match=r"--replicas 3 of 2 shards need 6 GPUs, and there are 4"):
        place_replicas(serve(3, num_shard=2))
    with pytest.raises(ConfigError, match=r"--replicas 5 need 5 GPUs, and there are 4"):
        place_replicas(serve(5))
