"""The pod of a server, whatever object owns it."""

from __future__ import annotations

from typing import Any

from tgi_cli.deploy.compose import LOAD_SECONDS
from tgi_cli.deploy.deployment import DATA, SECRETS, USER_ID, Deployment, binary_size
from tgi_cli.deploy.kubernetes.objects import SECURITY_CONTEXT, labels, non_root
from tgi_cli.deploy.kubernetes.options import KubernetesOptions

PRE_STOP_SECONDS = 5
"""Time from a pod's removal from the Service to SIGTERM: requests arrive until every node knows of
the removal. https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination"""

_PROBE_SECONDS = 5


def pod_template(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """A pod with one container."""
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(deployment.port),
        "prometheus.io/path": "/metrics",
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": non_root(USER_ID)
        | {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"},
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + deployment.stop_seconds,
        "containers": [_container(deployment)],
        "volumes": _volumes(deployment),
    }
    if deployment.gpus:
        # Nodes with GPUs often take no other pods.
        toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        spec["tolerations"] = [toleration]
    if options.several_pods:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(deployment)},
            }
        ]
    return {"metadata": {"labels": labels(deployment), "annotations": annotations}, "spec": spec}


def _container(deployment: Deployment) -> dict[str, Any]:
    variables = deployment.environment(SECRETS, DATA)
    container: dict[str, Any] = {
        "name": "tgi",
        "image": deployment.image,
        "args": [_literal(word) for word in deployment.arguments],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "ports": [{"name": "http", "containerPort": deployment.port}],
        "startupProbe": _probe("/health", LOAD_SECONDS // _PROBE_SECONDS),
        "readinessProbe": _probe("/health", 2),
        # The router's: a model server that dies or hangs is restarted within the pod.
        "livenessProbe": _probe("/v2/health/live", 12),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        "securityContext": SECURITY_CONTEXT | {"readOnlyRootFilesystem": True},
        "volumeMounts": _volume_mounts(deployment),
    }
    limits: dict[str, str | int] = {}
    if deployment.cpus is not None:
        limits["cpu"] = str(deployment.cpus)
    if deployment.memory is not None:
        limits["memory"] = quantity(deployment.memory)
    if deployment.gpus:
        limits["nvidia.com/gpu"] = str(deployment.gpus)
    if limits:
        # Requests that equal the limits: the pod is evicted last, and its cores are its own.
        container["resources"] = {"requests": dict(limits), "limits": limits}
    return container


def _probe(path: str, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": _PROBE_SECONDS,
        "timeoutSeconds": _PROBE_SECONDS,
        "failureThreshold": failures,
    }


def _volumes(deployment: Deployment) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "data", "persistentVolumeClaim": {"claimName": deployment.name}},
        {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
    ]
    if deployment.gpus:
        shared = {"medium": "Memory", "sizeLimit": "1Gi"}  # of NCCL
        volumes.append({"name": "shm", "emptyDir": shared})
    if deployment.secrets:
        secret = {"secretName": deployment.name, "defaultMode": 0o440}
        volumes.append({"name": "secrets", "secret": secret})
    for index, path in enumerate(deployment.mounts):
        volumes.append({"name": f"files-{index}", "hostPath": {"path": str(path)}})
    return volumes


def _volume_mounts(deployment: Deployment) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "data", "mountPath": DATA},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if deployment.gpus:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if deployment.secrets:
        mounts.append({"name": "secrets", "mountPath": SECRETS, "readOnly": True})
    for index, path in enumerate(deployment.mounts):
        mounts.append({"name": f"files-{index}", "mountPath": str(path), "readOnly": True})
    return mounts


def _literal(word: str) -> str:
    """An argument in which Kubernetes replaces no variables: ``$(NAME)`` is written ``$$(NAME)``.

    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#entrypoint
    """
    return word.replace("$", "$$")


def quantity(count: int) -> str:
    """Bytes as Kubernetes writes them."""
    return f"{binary_size(count)}i"
