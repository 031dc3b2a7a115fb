"""Servers that take several nodes each: https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/

A group of pods is a Ray cluster of its own. Its leader runs ``tgi serve --distributed ray``, which
has HTTP and places replicas, or their pipeline stages, on all nodes of the group; the workers only
join the cluster. A pod that restarts takes its group with it.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.config.ray_variables import SERVE_VARIABLES
from tgi_cli.deploy.deployment import Deployment
from tgi_cli.deploy.kubernetes.objects import SERVER, labels, metadata
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.kubernetes.pods import pod_template, quantity

LEADER_WORKER_SET = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
WORKER = f"{SERVER}-worker"
"""``app.kubernetes.io/name`` of the pods without HTTP."""

RAY_TOKEN = "ray-token"
"""Key of the Secret with what the nodes of a cluster authenticate by:
https://docs.ray.io/en/latest/ray-security/token-auth.html"""

RAY_BYTES = 3 << 29
"""Memory of Ray's own processes on a node."""

_PORT = 6379
_OBJECT_STORE_BYTES = 256 << 20
_START_SECONDS = 150
"""Time for Ray to start on a node; its default of 30 s is short on a busy one."""
_REMOVAL_SECONDS = 30
"""Time for Ray to remove replicas that have finished their requests."""


def leader_worker_set(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """Groups of ``options.nodes`` pods."""
    api_version, kind = LEADER_WORKER_SET
    spec: dict[str, Any] = {} if options.autoscaler else {"replicas": options.pods}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": metadata(deployment, options),
        "spec": spec
        | {
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": options.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _leader(deployment, options),
                "workerTemplate": _worker(deployment, options),
            },
        },
    }


def _leader(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    template = _node(deployment, options)
    (container,) = template["spec"]["containers"]
    start = _ray_start(deployment, "--head", f"--port={_PORT}", "--include-dashboard=false")
    container["command"] = ["/bin/sh", "-c", f'{start} && exec tgi "$@"', "tgi"]
    container["args"] += ["--distributed=ray", "--ray-address=auto"]
    if options.replicas == 1:
        container["args"].append(f"--replicas={max(1, options.nodes // options.stages)}")
    if not deployment.gpus and deployment.cpus is not None:
        container["args"].append(f"--replica-cpus={deployment.cpus}")
    # Its process ends with the cluster; while no replica is there, a restart would not help.
    del container["livenessProbe"]
    return template


def _worker(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    template = _node(deployment, options)
    template["metadata"] = {"labels": labels(deployment, WORKER)}
    spec = template["spec"]
    spec.pop("topologySpreadConstraints", None)
    (container,) = spec["containers"]
    for name in ("args", "ports", "startupProbe", "readinessProbe", "livenessProbe"):
        del container[name]
    container["command"] = ["/bin/sh", "-c", _join_script(deployment)]
    # Its replicas finish their requests as long as the leader passes them on.
    wait = ["python", "-c", _wait_script(deployment)]
    container["lifecycle"] = {"preStop": {"exec": {"command": wait}}}
    return template


def _join_script(deployment: Deployment) -> str:
    """Joins the leader's cluster, for a shell, and leaves it at SIGTERM.

    A container's first process ignores signals that it does not handle, and its children get none.
    """
    address = f'--address="$LWS_LEADER_ADDRESS:{_PORT}"'
    join = _ray_start(deployment, address, "--block")
    leave = 'kill -TERM "$ray" 2> /dev/null; wait "$ray"; exit 143'
    return f"trap '{leave}' TERM; until {join} & ray=$!; wait \"$ray\"; do sleep 2; done"


def _wait_script(deployment: Deployment) -> str:
    """Waits until the leader's port is closed, for Python: three attempts in a row have failed."""
    return f"""\
import os, socket, time
failures = 0
while failures < 3:
    try:
        socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], {deployment.port}), 5).close()
        failures = 0
    except OSError:
        failures += 1
    time.sleep(1)
"""


def _node(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """A server's pod with what Ray needs: a token, memory, and space for its logs and objects."""
    template = pod_template(deployment, options)
    spec = template["spec"]
    spec["terminationGracePeriodSeconds"] += _REMOVAL_SECONDS
    (container,) = spec["containers"]
    key = {"secretKeyRef": {"name": deployment.name, "key": RAY_TOKEN}}
    container["env"] += [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": key},
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        {"name": "RAY_raylet_start_wait_time_s", "value": str(_START_SECONDS)},
        *({"name": name, "value": value} for name, value in SERVE_VARIABLES.items()),
    ]
    if deployment.memory is not None:
        memory = quantity(deployment.memory + RAY_BYTES)
        for limits in container["resources"].values():
            limits["memory"] = memory
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    volumes["tmp"]["emptyDir"] = {"sizeLimit": "8Gi"}
    if "shm" not in volumes:
        shared = {"medium": "Memory", "sizeLimit": "1Gi"}
        spec["volumes"].append({"name": "shm", "emptyDir": shared})
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    return template


def _ray_start(deployment: Deployment, *flags: str) -> str:
    """The command that starts Ray on a node, for a shell."""
    words = ["ray", "start", *flags, f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    if deployment.cpus is not None:
        words.append(f"--num-cpus={deployment.cpus}")
    return " ".join([*words, f"--num-gpus={deployment.gpus}"])
