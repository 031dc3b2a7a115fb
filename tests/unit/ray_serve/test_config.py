"""Resources of replicas, and settings that a deployment on Ray refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tgi_cli.config import ServeConfig
from tgi_cli.errors import ConfigError
from tgi_cli.ray_serve.config import Bundle, RayConfig, bundle_of, check_ray
from tgi_cli.router.config import RouterConfig

SERVE = ServeConfig(model_id="org/model")
ROUTER = RouterConfig(model_path=Path(), model_id="org/model", engine_url="")


@pytest.mark.parametrize(
    ("config", "shards", "cluster", "bundle"),
    [
        (RayConfig(replicas=2), None, {"CPU": 8.0}, Bundle(4, 0)),
        (RayConfig(replicas=2, max_replicas=8), None, {"CPU": 8.0}, Bundle(1, 0)),
        (RayConfig(replicas=4), None, {"CPU": 2.0}, Bundle(1, 0)),
        (RayConfig(replicas=2, replica_cpus=3), 2, {"CPU": 8.0}, Bundle(3, 0)),
        (RayConfig(replicas=2), None, {"CPU": 64.0, "GPU": 8.0}, Bundle(1, 1)),
        (RayConfig(replicas=2), 4, {"CPU": 64.0, "GPU": 8.0}, Bundle(1, 4)),
    ],
)
def test_the_bundle_of_a_replica(
    config: RayConfig, shards: int | None, cluster: dict[str, float], bundle: Bundle
) -> None:
    assert bundle_of(config, shards, 1, cluster) == bundle


def test_each_stage_of_a_replica_has_a_bundle() -> None:
    two = RayConfig(replicas=2)
    assert bundle_of(two, 4, 3, {"CPU": 64.0, "GPU": 24.0}) == Bundle(1, 4, 3)
    assert bundle_of(two, None, 2, {"CPU": 8.0}) == Bundle(2, 0, 2)
    with pytest.raises(ConfigError, match=r"2 replicas of 3 stages with 1 CPUs each need 6, and"):
        bundle_of(RayConfig(own_cluster=True, replicas=2), None, 3, {"CPU": 4.0})


def test_nodes_without_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="--nnodes is for nodes without Ray"):
        check_ray(RayConfig(), replace(SERVE, nnodes=2), ROUTER)


def test_the_shards_of_a_replica_are_in_one_bundle() -> None:
    bundle = bundle_of(RayConfig(replicas=2), 4, 1, {"CPU": 64.0, "GPU": 8.0})
    assert bundle.resources == {"CPU": 1, "GPU": 4}
    assert Bundle(2, 0).resources == {"CPU": 2}


def test_replicas_that_this_machine_cannot_hold_are_an_error() -> None:
    here = RayConfig(own_cluster=True, replicas=3, replica_cpus=2)
    with pytest.raises(ConfigError, match=r"3 replicas with 2 CPUs each need 6, .* has 4"):
        bundle_of(here, None, 1, {"CPU": 4.0})
    with pytest.raises(ConfigError, match=r"3 replicas with 4 GPUs each need 12"):
        bundle_of(RayConfig(own_cluster=True, replicas=3), 4, 1, {"CPU": 64.0, "GPU": 8.0})
    # Another cluster may grow.
    assert bundle_of(replace(here, own_cluster=False), None, 1, {"CPU": 4.0}) == Bundle(2, 0)


def test_bounds_of_autoscaling() -> None:
    fixed = RayConfig(replicas=2)
    assert (fixed.lowest, fixed.highest, fixed.autoscales) == (2, 2, False)
    scaled = RayConfig(replicas=2, min_replicas=1, max_replicas=4)
    assert (scaled.lowest, scaled.highest, scaled.autoscales) == (1, 4, True)
    check_ray(scaled, SERVE, ROUTER)


@pytest.mark.parametrize(
    ("config", "serve", "router", "flag"),
    [
        (RayConfig(replicas=1, min_replicas=2), SERVE, ROUTER, "--min-replicas 2"),
        (RayConfig(replicas=3, max_replicas=2), SERVE, ROUTER, "--max-replicas 2"),
        (RayConfig(), replace(SERVE, port=0), ROUTER, "--port 0"),
        (RayConfig(), SERVE, replace(ROUTER, enable_sleep_mode=True), "sleep"),
        (RayConfig(), SERVE, replace(ROUTER, sleep_idle_seconds=5.0), "sleep"),
        (RayConfig(), replace(SERVE, shard_uds_path=Path("/x")), ROUTER, "--shard-uds-path"),
    ],
)
def test_settings_that_do_not_go_together(
    config: RayConfig, serve: ServeConfig, router: RouterConfig, flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag) as raised:
        check_ray(config, serve, router)
    assert raised.value.remedy
