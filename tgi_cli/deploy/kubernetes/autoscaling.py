"""Objects that add pods under load and remove them after it.

Two measures: requests that wait in the engine (``tgi_queue_size``), and the time between the tokens
of a request, whose 90th percentile grows with the batch. The larger number of pods of the two is
taken. A percentile of no observations is NaN, which counts as 0. A queue without a series does not:
it would remove pods under load because Prometheus cannot reach them.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.deploy.deployment import Deployment
from tgi_cli.deploy.kubernetes.nodes import LEADER_WORKER_SET
from tgi_cli.deploy.kubernetes.objects import SERVER, metadata, to_yaml
from tgi_cli.deploy.kubernetes.options import KubernetesOptions

QUEUE_METRIC = "tgi_queue_size"
LATENCY_METRIC = "tgi_inter_token_p90_seconds"
"""Name under which prometheus-adapter serves the percentile."""

_BUCKETS = "tgi_request_inter_token_seconds_bucket"
_COUNT = "tgi_request_inter_token_seconds_count"
_WINDOW = "2m"


def autoscaling_objects(deployment: Deployment, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The autoscaler that ``options`` name, with what it reads its metrics through."""
    if options.autoscaler == "hpa":
        return [pod_autoscaler(deployment, options), adapter_rules(deployment, options)]
    if options.autoscaler == "keda":
        return [scaled_object(deployment, options)]
    return []


def pod_autoscaler(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/
    horizontal-pod-autoscaler-v2/"""
    metrics = [_pods_metric(QUEUE_METRIC, str(options.target_queue))]
    if options.target_token_seconds is not None:
        milliseconds = round(options.target_token_seconds * 1000)
        metrics.append(_pods_metric(LATENCY_METRIC, f"{milliseconds}m"))
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(deployment, options),
        "spec": {
            "scaleTargetRef": _target(deployment, options),
            "minReplicas": options.pods,
            "maxReplicas": options.max_pods,
            "metrics": metrics,
            "behavior": _behavior(),
        },
    }


def adapter_rules(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """The configuration of prometheus-adapter, as its chart's value ``rules.existing`` names it.

    https://github.com/kubernetes-sigs/prometheus-adapter/blob/master/docs/config.md
    """
    resources = {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}}
    selected = "{<<.LabelMatchers>>}"
    count = f"sum(rate({_COUNT}{selected}[{_WINDOW}])) by (<<.GroupBy>>)"
    buckets = f"sum(rate({_BUCKETS}{selected}[{_WINDOW}])) by (le, <<.GroupBy>>)"
    engines = f"max({QUEUE_METRIC}{selected}) by (replica, <<.GroupBy>>)"
    queries = (
        (QUEUE_METRIC, QUEUE_METRIC, f"sum({engines}) by (<<.GroupBy>>)"),
        (_BUCKETS, LATENCY_METRIC, f"(histogram_quantile(0.9, {buckets}) >= 0) or 0 * {count}"),
    )
    rules = [
        {
            "seriesQuery": f'{series}{{namespace!="",pod!=""}}',
            "resources": resources,
            "name": {"matches": f"^{series}$", "as": name},
            "metricsQuery": query,
        }
        for series, name, query in queries
    ]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(deployment, options, "-adapter-rules"),
        "data": {"config.yaml": to_yaml({"rules": rules})},
    }


def scaled_object(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """https://keda.sh/docs/latest/reference/scaledobject-spec/"""
    selected = _selector(deployment, options)
    queue = f"sum(max by (namespace, pod, replica) ({QUEUE_METRIC}{{{selected}}}))"
    triggers = [_trigger(options, "AverageValue", queue, options.target_queue)]
    if options.target_token_seconds is not None:
        buckets = f"sum by (le) (rate({_BUCKETS}{{{selected}}}[{_WINDOW}]))"
        query = f"(histogram_quantile(0.9, {buckets}) >= 0) or vector(0)"
        triggers.append(_trigger(options, "Value", query, options.target_token_seconds))
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(deployment, options),
        "spec": {
            "scaleTargetRef": _target(deployment, options),
            "minReplicaCount": options.pods,
            "maxReplicaCount": options.max_pods,
            "pollingInterval": 15,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior()}},
            "triggers": triggers,
        },
    }


def _target(deployment: Deployment, options: KubernetesOptions) -> dict[str, str]:
    several = options.nodes > 1
    api_version, kind = LEADER_WORKER_SET if several else ("apps/v1", "Deployment")
    return {"apiVersion": api_version, "kind": kind, "name": deployment.name}


def _pods_metric(name: str, target: str) -> dict[str, Any]:
    value = {"type": "AverageValue", "averageValue": target}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": value}}


def _trigger(options: KubernetesOptions, kind: str, query: str, threshold: float) -> dict[str, Any]:
    """https://keda.sh/docs/latest/scalers/prometheus/"""
    return {
        "type": "prometheus",
        "metricType": kind,
        "metadata": {
            "serverAddress": options.prometheus_url,
            "query": query,
            "threshold": f"{threshold:g}",
            "ignoreNullValues": "false",  # no value is an error, not 0
        },
    }


def _selector(deployment: Deployment, options: KubernetesOptions) -> str:
    """Labels of the series, which the PodMonitor and common scrape configurations copy from the
    pods' labels."""
    wanted = {
        "app_kubernetes_io_name": SERVER,
        "app_kubernetes_io_instance": deployment.name,
    }
    if options.namespace:
        wanted["namespace"] = options.namespace
    return ",".join(f'{label}="{value}"' for label, value in wanted.items())


def _behavior() -> dict[str, Any]:
    """Add at most two pods a minute, as each loads the model; remove none for five minutes."""
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": 30,
            "policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 300,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
        },
    }
