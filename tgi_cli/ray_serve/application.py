"""The application that Ray Serve runs: the replicas, and the deployment in front of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.schema import LoggingConfig

from tgi_cli.config import ServeConfig
from tgi_cli.ray_serve.autoscaling import LoadPolicy
from tgi_cli.ray_serve.config import Bundle, RayConfig
from tgi_cli.ray_serve.engine_replica import EngineReplica, EngineReplicaConfig
from tgi_cli.ray_serve.front_deployment import Front
from tgi_cli.ray_serve.prefix_router import PrefixRouter
from tgi_cli.router.config import IMAGE_PAYLOAD, RouterConfig

ENGINE, FRONT = "engine", "front"
"""Names of the deployments."""

_HEALTH_PERIOD_SECONDS = 1.0
"""A replica whose process has died is noticed by the next check: by Ray's default, after 10 s."""
_HEALTH_TIMEOUT_SECONDS = 10.0
"""One that hangs is ended after three checks without an answer."""
_STATS_SECONDS = 1.0
_DRAIN_LOOP_SECONDS = 0.5
_DRAIN_MARGIN_SECONDS = 15.0
"""For a model server to end after the last request."""
_CONSTRUCTOR_TRIES = 2
_FRONT_REQUESTS = 4096
"""Requests that a replica of the front may pass on at once; the replicas' limits bound them."""


def make_application(
    config: RayConfig,
    bundle: Bundle,
    model: ServeConfig,
    router: RouterConfig,
    locate: Callable[[ServeConfig], tuple[ServeConfig, Path]],
) -> Application:
    """The application of a model.

    Args:
        config: Of the deployment.
        bundle: Resources of each stage of a replica.
        model: Of the model servers.
        router: Of the replicas' HTTP applications, but for the model and the engine.
        locate: Finds the model on a replica's machine.
    """
    drain = model.graceful_termination_timeout + _DRAIN_MARGIN_SECONDS
    scaling: dict[str, object] = {"num_replicas": config.replicas}
    if config.autoscales:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=config.lowest,
                initial_replicas=config.replicas,
                max_replicas=config.highest,
                target_ongoing_requests=config.target_ongoing_requests,
                policy=AutoscalingPolicy(
                    policy_function=f"{LoadPolicy.__module__}:{LoadPolicy.__name__}",
                    policy_kwargs={"target_kv_usage": config.target_kv_usage},
                ),
            )
        }
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE,
        # The replica takes the whole first bundle, of the last stage: its shards are processes
        # within it. It places the other stages into the others.
        ray_actor_options={"num_cpus": bundle.cpus, "num_gpus": bundle.gpus},
        placement_group_bundles=[bundle.resources] * bundle.stages,
        placement_group_strategy=config.stage_placement.upper().replace("-", "_"),
        max_ongoing_requests=model.max_concurrent_requests,
        max_queued_requests=model.max_concurrent_requests,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOP_SECONDS,
        graceful_shutdown_timeout_s=drain,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{PrefixRouter.__module__}.{PrefixRouter.__name__}",
            request_router_kwargs={
                "cache_threshold": router.cache_threshold,
                "balance_abs_threshold": router.balance_abs_threshold,
                "balance_rel_threshold": router.balance_rel_threshold,
            },
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
        **scaling,
    )
    front = serve.deployment(
        Front,
        name=FRONT,
        num_replicas=config.ray_fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_FRONT_REQUESTS,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOP_SECONDS,
        graceful_shutdown_timeout_s=drain,
    )
    replica = EngineReplicaConfig(
        serve=model, router=router, bundle=bundle, highest=config.highest, locate=locate
    )
    limit = router.payload_limit or IMAGE_PAYLOAD
    engines = engine.bind(replica)
    return front.bind(engines, limit, router.api_keys, router.logger_level, router.json_output)


def quiet_logs() -> LoggingConfig:
    """Ray's own logs without its access log: replicas write one."""
    return LoggingConfig(enable_access_log=False, log_level="WARNING")
