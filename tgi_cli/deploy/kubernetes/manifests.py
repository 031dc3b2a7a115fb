"""All manifests of a deployment, in one file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from tgi_cli.deploy.compose import LOAD_SECONDS
from tgi_cli.deploy.deployment import API_KEY, Deployment
from tgi_cli.deploy.kubernetes.autoscaling import autoscaling_objects
from tgi_cli.deploy.kubernetes.gateways import GATEWAY, GATEWAY_KEY, gateway_objects
from tgi_cli.deploy.kubernetes.monitoring import monitoring_objects
from tgi_cli.deploy.kubernetes.nodes import RAY_TOKEN, WORKER, leader_worker_set
from tgi_cli.deploy.kubernetes.objects import SERVER, labels, metadata, to_yaml
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.kubernetes.pods import pod_template, quantity
from tgi_cli.errors import ConfigError

ONE_POD = KubernetesOptions()

_MARGIN_SECONDS = 300
"""Time to pull the image, in addition to that of loading the model."""


def render(deployment: Deployment, options: KubernetesOptions = ONE_POD) -> str:
    """YAML documents.

    Raises:
        ConfigError: cores or NUMA nodes are named, which the kubelet chooses itself.
    """
    if deployment.cpuset_cpus or deployment.cpuset_mems:
        raise ConfigError(
            "a pod cannot name its cores and NUMA nodes (--cpuset-cpus, --cpuset-mems)",
            "give --cpus; with its static CPU manager, the kubelet binds the pod to whole cores",
        )
    header = deployment.header(*_requirements(deployment, options))
    objects = [
        claim(deployment, options),
        service(deployment, options),
        leader_worker_set(deployment, options)
        if options.nodes > 1
        else deployment_object(deployment, options),
    ]
    if options.several_pods:
        objects.append(disruption_budget(deployment, options))
    objects += autoscaling_objects(deployment, options)
    objects += gateway_objects(deployment, options)
    objects += monitoring_objects(deployment, options)
    return header + to_yaml(*objects, explicit_start=True)


def claim(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """The volume for models, which survives the pods and is shared by them."""
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if _shares_volume(options) else "ReadWriteOnce"],
        "resources": {"requests": {"storage": quantity(deployment.storage)}},
    }
    if options.storage_class:
        spec["storageClassName"] = options.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(deployment, options),
        "spec": spec,
    }


def service(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """The address of the pods."""
    port = {"name": "http", "port": deployment.port, "targetPort": "http"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, options),
        "spec": {"selector": labels(deployment), "ports": [port]},
    }


def deployment_object(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """The object that owns the pods."""
    spec: dict[str, Any] = {} if options.autoscaler else {"replicas": options.pods}
    if options.several_pods:
        # A new pod answers before an old one drains: it needs the resources of one pod more.
        spec["strategy"] = {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        }
    else:
        # The volume belongs to one node, and memory is for one pod.
        spec["strategy"] = {"type": "Recreate"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, options),
        "spec": spec
        | {
            # Until then, a pod that still downloads its model is no failed rollout.
            "progressDeadlineSeconds": LOAD_SECONDS + _MARGIN_SECONDS,
            "selector": {"matchLabels": labels(deployment)},
            "template": pod_template(deployment, options),
        },
    }


def disruption_budget(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """Nodes that are drained for maintenance take one pod at a time.

    A worker takes its group with it: the next pod waits until the group's leader is ready again.
    """
    selector: dict[str, Any] = {"matchLabels": labels(deployment)}
    if options.nodes > 1:
        name, instance = labels(deployment)
        selector = {
            "matchLabels": {instance: deployment.name},
            "matchExpressions": [{"key": name, "operator": "In", "values": [SERVER, WORKER]}],
        }
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, options),
        "spec": {"maxUnavailable": 1, "selector": selector},
    }


def _requirements(deployment: Deployment, options: KubernetesOptions) -> list[str]:
    """What the cluster must have before the manifests are applied, a line each."""
    lines = []
    if secrets := list(_secrets(deployment, options)):
        create = f"kubectl create secret generic {deployment.name} {' '.join(secrets)}"
        namespace = f" --namespace={options.namespace}" if options.namespace else ""
        lines.append(f"First: {create}{namespace}")
    if options.nodes > 1:
        lines.append(
            "The cluster needs LeaderWorkerSet v1, and the image Ray: docker build --build-arg "
            "EXTRAS=vision,ray"
        )
    if options.gateway == "inference-pool":
        lines.append(
            "The cluster needs the Gateway API with its inference extension (InferencePool v1), "
            f"and a Gateway named {GATEWAY}."
        )
    if options.autoscaler == "hpa":
        lines.append(
            "prometheus-adapter serves the autoscaler's metrics: its chart's value rules.existing "
            f"is {deployment.name}-adapter-rules, which must be in its namespace."
        )
    lines += [f"Every node that may run the pod needs {path}." for path in deployment.mounts]
    if _shares_volume(options):
        lines.append("The volume is shared by all pods: its storage class must be ReadWriteMany.")
    return lines


def _secrets(deployment: Deployment, options: KubernetesOptions) -> Iterator[str]:
    """Arguments of ``kubectl create secret``, for a shell."""
    for name, path in deployment.secrets.items():
        yield shlex.quote(f"--from-file={name}={path}")
    if options.gateway == "smg" and (key := deployment.secrets.get(API_KEY)):
        yield f'--from-literal={GATEWAY_KEY}="$(head -n 1 {shlex.quote(str(key))})"'
    if options.nodes > 1:
        yield f'--from-literal={RAY_TOKEN}="$(openssl rand -hex 32)"'


def _shares_volume(options: KubernetesOptions) -> bool:
    return options.several_pods or options.nodes > 1
