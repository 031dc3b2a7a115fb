"""Settings of a deployment on Ray."""

from __future__ import annotations

from tgi_cli.config.settings.setting import SERVE, Setting, panel
from tgi_cli.config.settings.values import number, one_of, text, whole

ENGINES = ("ray",)
PLACEMENTS = ("pack", "spread", "strict-pack", "strict-spread")
"""Ray's strategies of placement groups:
https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html"""

RAY_SETTINGS = panel(
    "Ray",
    (SERVE,),
    distributed=Setting(
        one_of("ENGINE", *ENGINES),
        "Deploy the model on a cluster of machines instead of serving it here: ray joins the Ray "
        "cluster at --ray-address. `tgi deploy ray` starts one on this machine.",
    ),
    ray_address=Setting(
        text("ADDRESS"), "Address of the Ray cluster; auto: the one that runs here.", "auto"
    ),
    ray_application=Setting(
        text("NAME"), "Name in Ray Serve, of which one application at a time has each.", "tgi"
    ),
    ray_fronts=Setting(
        whole(1, 64),
        "Replicas of the deployment that reads requests and passes on answers; two survive the "
        "loss of a machine.",
        1,
    ),
    min_replicas=Setting(
        whole(1, 1000), "Lower bound of autoscaling on Ray. Default: that of --replicas."
    ),
    max_replicas=Setting(
        whole(1, 1000), "Upper bound of autoscaling on Ray. Default: that of --replicas."
    ),
    replica_cpus=Setting(
        whole(1, 4096),
        "CPUs that Ray reserves for a replica, or for each of its pipeline stages, and to which "
        "its threads are limited. Default: 1 with GPUs, otherwise a fair part of the cluster.",
    ),
    stage_placement=Setting(
        one_of("STRATEGY", *PLACEMENTS),
        "How Ray places the pipeline stages of a replica: pack: on few nodes; spread: on as many "
        "as possible; strict: or not at all. The shards of a stage stay together.",
        "pack",
    ),
    target_ongoing_requests=Setting(
        whole(1, 65536), "Requests of a replica that autoscaling on Ray aims at.", 16
    ),
    target_kv_usage=Setting(
        number(0.01, 1.0), "Share of the KV cache in use that autoscaling on Ray aims at.", 0.8
    ),
)
"""Settings that servers without Ray refuse."""
