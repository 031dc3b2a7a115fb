"""What a deployment to Kubernetes has beyond that of one container."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tgi_cli.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Objects beside the pod, and how many pods there are.

    Attributes:
        namespace: namespace of all objects; empty: the one of `kubectl`'s context.
        storage_class: storage class of the volume for models; empty: the cluster's default.
        nodes: nodes of one server; more than one: groups of pods take the place of pods.
        pods: number of pods, or the smallest number with an autoscaler.
        max_pods: largest number of pods with an autoscaler.
        autoscaler: ``hpa``, ``keda`` or empty.
        target_queue: waiting requests per pod beyond which pods are added.
        target_token_seconds: time between tokens, 90th percentile, beyond which pods are added;
            None: the queue decides alone.
        prometheus_url: Prometheus that KEDA asks.
        gateway: ``inference-pool``, ``smg`` or empty.
        monitoring: whether objects of the Prometheus operator are added.
        adapters: whether the server has LoRA adapters.
        replicas: engines in each pod.
        stages: pipeline stages of each engine.
    """

    namespace: str = ""
    storage_class: str = ""
    nodes: int = 1
    pods: int = 1
    max_pods: int = 4
    autoscaler: str = ""
    target_queue: int = 2
    target_token_seconds: float | None = None
    prometheus_url: str = ""
    gateway: str = ""
    monitoring: bool = False
    adapters: bool = False
    replicas: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        """Check what cannot work. Raises ConfigError."""
        for flag, value in (("namespace", self.namespace), ("storage-class", self.storage_class)):
            if value and not _NAME.fullmatch(value):
                raise ConfigError(
                    f"--{flag} {value!r} is not a name of Kubernetes",
                    "use lower-case letters, digits, dots and dashes",
                )
        if self.autoscaler and self.max_pods <= self.pods:
            raise ConfigError(
                f"--max-pods {self.max_pods} leaves nothing to scale from --pods {self.pods}",
                "give a larger number, or leave out --autoscale",
            )
        if self.gateway and not self.namespace:
            raise ConfigError(
                "a gateway reads the pods of a namespace, which its role binding names",
                "give --namespace NAME",
            )
        if self.gateway == "inference-pool" and max(self.replicas, self.nodes) > 1:
            raise ConfigError(
                "an endpoint picker reads the load of one engine per pod, and --replicas and "
                "--nodes make several behind one address",
                "give --pods instead",
            )

    @property
    def several_pods(self) -> bool:
        """Whether there may be more than one server."""
        return self.pods > 1 or bool(self.autoscaler)
