"""Manifests of Kubernetes: https://kubernetes.io/docs/reference/kubernetes-api/

A Deployment of one pod, its Service and the claim of the volume for models. :func:`pod_template`
does not depend on the object that owns the pods.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from tgi_cli.deploy.compose import LOAD_SECONDS
from tgi_cli.deploy.deployment import DATA, SECRETS, USER_ID, Deployment, binary_size
from tgi_cli.errors import ConfigError

PRE_STOP_SECONDS = 5
"""Time from a pod's removal from the Service to SIGTERM: requests arrive until every node knows of
the removal. https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination"""

_PROBE_SECONDS = 5


def render(deployment: Deployment) -> str:
    """YAML documents.

    Raises:
        ConfigError: cores or NUMA nodes are named, which the kubelet chooses itself.
    """
    if deployment.cpuset_cpus or deployment.cpuset_mems:
        raise ConfigError(
            "a pod cannot name its cores and NUMA nodes (--cpuset-cpus, --cpuset-mems)",
            "give --cpus; with its static CPU manager, the kubelet binds the pod to whole cores",
        )
    secrets = [f"--from-file={name}={path}" for name, path in deployment.secrets.items()]
    create = ["kubectl", "create", "secret", "generic", deployment.name, *secrets]
    header = deployment.header(
        *((f"First: {shlex.join(create)}",) if secrets else ()),
        *(f"Every node that may run the pod needs {path}." for path in deployment.mounts),
    )
    manifests = (claim(deployment), service(deployment), deployment_object(deployment))
    text: str = yaml.safe_dump_all(manifests, sort_keys=False, width=100, explicit_start=True)
    return header + text


def claim(deployment: Deployment) -> dict[str, Any]:
    """The volume for models, which survives the pod."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(deployment),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": _size(deployment.storage)}},
        },
    }


def service(deployment: Deployment) -> dict[str, Any]:
    """The address of the pods."""
    port = {"name": "http", "port": deployment.port, "targetPort": "http"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployment),
        "spec": {"selector": _labels(deployment), "ports": [port]},
    }


def deployment_object(deployment: Deployment) -> dict[str, Any]:
    """The object that owns the pod."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(deployment),
        "spec": {
            "replicas": 1,
            # The volume belongs to one node, and memory is for one pod.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _labels(deployment)},
            "template": pod_template(deployment),
        },
    }


def pod_template(deployment: Deployment) -> dict[str, Any]:
    """A pod with one container."""
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(deployment.port),
        "prometheus.io/path": "/metrics",
    }
    group = {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "metadata": {"labels": _labels(deployment), "annotations": annotations},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": group,
            "terminationGracePeriodSeconds": PRE_STOP_SECONDS + deployment.stop_seconds,
            "containers": [_container(deployment)],
            "volumes": _volumes(deployment),
        },
    }


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
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _volume_mounts(deployment),
    }
    limits: dict[str, str | int] = {}
    if deployment.cpus is not None:
        limits["cpu"] = str(deployment.cpus)
    if deployment.memory is not None:
        limits["memory"] = _size(deployment.memory)
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


def _metadata(deployment: Deployment) -> dict[str, Any]:
    return {"name": deployment.name, "labels": _labels(deployment)}


def _labels(deployment: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tgi", "app.kubernetes.io/instance": deployment.name}


def _literal(word: str) -> str:
    """An argument in which Kubernetes replaces no variables: ``$(NAME)`` is written ``$$(NAME)``.

    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#entrypoint
    """
    return word.replace("$", "$$")


def _size(count: int) -> str:
    return f"{binary_size(count)}i"
