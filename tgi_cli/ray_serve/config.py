"""The configuration of a deployment on Ray, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tgi_cli.config import ServeConfig
from tgi_cli.config.settings import default
from tgi_cli.errors import ConfigError
from tgi_cli.router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """How a model is deployed on Ray.

    Attributes:
        own_cluster: Start a cluster on this machine, which ends with the command.
        ray_address: Of the cluster to join; see ``ray.init``.
        ray_application: Name of the application in Ray Serve.
        ray_fronts: Replicas of the deployment that receives HTTP requests.
        replicas: Replicas of the model at the start.
        min_replicas, max_replicas: Bounds of autoscaling. Default: ``replicas``.
        replica_cpus: CPUs of each stage of a replica, as Ray counts them. Default: of a cluster
            without GPUs a fair part, else 1.
        stage_placement: Strategy by which the stages of a replica are placed on nodes.
        target_ongoing_requests: Requests of a replica that autoscaling aims at.
        target_kv_usage: Share of the KV cache in use that autoscaling aims at.
        cluster_cpus, cluster_gpus: Of the own cluster. Default: those of the machine.
    """

    own_cluster: bool = False
    ray_address: str = default("ray_address")
    ray_application: str = default("ray_application")
    ray_fronts: int = default("ray_fronts")
    replicas: int = default("replicas")
    min_replicas: int | None = None
    max_replicas: int | None = None
    replica_cpus: int | None = None
    stage_placement: str = default("stage_placement")
    target_ongoing_requests: int = default("target_ongoing_requests")
    target_kv_usage: float = default("target_kv_usage")
    cluster_cpus: int | None = None
    cluster_gpus: int | None = None

    @property
    def lowest(self) -> int:
        """The lower bound of autoscaling."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def highest(self) -> int:
        """The upper bound of autoscaling."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def autoscales(self) -> bool:
        """Whether the number of replicas changes."""
        return self.lowest < self.highest


@dataclass(frozen=True, slots=True)
class Bundle:
    """Ray's resources of each pipeline stage of a replica: a bundle of a placement group, and thus
    on one node.

    The shards of a stage are processes within it, and see the GPUs that Ray has given to it.
    """

    cpus: int
    gpus: int
    stages: int = 1
    """Bundles of a replica."""

    @property
    def resources(self) -> dict[str, int]:
        """Under Ray's names."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def bundle_of(
    config: RayConfig, num_shard: int | None, stages: int, cluster: Mapping[str, float]
) -> Bundle:
    """The resources of a replica.

    Args:
        config: Of the deployment.
        num_shard: Shards of each stage, if that is set.
        stages: Of a replica.
        cluster: Resources of the whole cluster, under Ray's names.

    Raises:
        ConfigError: The own cluster has not as many as the replicas need.
    """
    gpus = (num_shard or 1) if cluster.get("GPU") else 0
    cpus = config.replica_cpus
    if cpus is None:
        cpus = 1 if gpus else max(1, int(cluster.get("CPU", 1)) // (config.highest * stages))
    bundle = Bundle(cpus, gpus, stages)
    for name, each in bundle.resources.items():
        needed, there = each * config.replicas * stages, cluster.get(name, 0)
        if config.own_cluster and needed > there:
            of = f" of {stages} stages" if stages > 1 else ""
            raise ConfigError(
                f"{config.replicas} replicas{of} with {each:g} {name}s each need {needed:g}, and "
                f"this machine has {there:g}",
                "lower --replicas, --replica-cpus, --num-shard or --pipeline-parallel-size",
            )
    return bundle


def check_ray(config: RayConfig, serve: ServeConfig, router: RouterConfig) -> None:
    """Refuse settings that contradict each other or a deployment on Ray. Raises ConfigError."""
    if not config.lowest <= config.replicas <= config.highest:
        raise ConfigError(
            f"--replicas {config.replicas} is not from --min-replicas {config.lowest} to "
            f"--max-replicas {config.highest}",
            "change one of them",
        )
    if not serve.port:
        raise ConfigError("--port 0: Ray's proxies need a port of their own", "name one")
    if router.may_sleep:
        raise ConfigError(
            "replicas on Ray do not sleep",
            "leave off --sleep-idle-seconds and --enable-sleep-mode; --min-replicas and "
            "--max-replicas follow the load",
        )
    if serve.nnodes > 1:
        raise ConfigError(
            "--nnodes is for nodes without Ray, which places stages itself",
            "leave it off, or --distributed",
        )
    if serve.shard_uds_path is not None:
        raise ConfigError(
            "TGI's clients of --shard-uds-path drive one model server on their own machine",
            "leave off --shard-uds-path, or --distributed",
        )
