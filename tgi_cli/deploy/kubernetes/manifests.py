"""All manifests of a deployment, in one file."""

from __future__ import annotations

import shlex
from typing import Any

from tgi_cli.deploy.deployment import Deployment
from tgi_cli.deploy.kubernetes.autoscaling import autoscaling_objects
from tgi_cli.deploy.kubernetes.gateways import GATEWAY, gateway_objects, secret_arguments
from tgi_cli.deploy.kubernetes.monitoring import monitoring_objects
from tgi_cli.deploy.kubernetes.objects import labels, metadata, to_yaml
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.kubernetes.pods import pod_template, quantity
from tgi_cli.errors import ConfigError

ONE_POD = KubernetesOptions()


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
        deployment_object(deployment, options),
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
        "accessModes": ["ReadWriteMany" if options.several_pods else "ReadWriteOnce"],
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
        # A new pod answers before an old one drains: it needs room for one pod more.
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
            "selector": {"matchLabels": labels(deployment)},
            "template": pod_template(deployment, options),
        },
    }


def disruption_budget(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """Nodes that are drained for maintenance take one pod at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, options),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(deployment)}},
    }


def _requirements(deployment: Deployment, options: KubernetesOptions) -> list[str]:
    """What the cluster must have before the manifests are applied, a line each."""
    lines = []
    if deployment.secrets:
        secrets = [f"--from-file={name}={path}" for name, path in deployment.secrets.items()]
        create = ["kubectl", "create", "secret", "generic", deployment.name, *secrets]
        if options.namespace:
            create.append(f"--namespace={options.namespace}")
        lines.append(f"First: {shlex.join(create)}{secret_arguments(deployment, options)}")
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
    if options.several_pods:
        lines.append("The volume is shared by all pods: its storage class must be ReadWriteMany.")
    return lines
