"""What spreads requests over the pods by the prefixes of their prompts.

An InferencePool of the Gateway API inference extension, with the endpoint picker of llm-d that it
names, or SMG. Both send a request where its prefix is cached unless that pod is too busy.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.deploy.deployment import API_KEY, Deployment
from tgi_cli.deploy.kubernetes.objects import (
    SECURITY_CONTEXT,
    SERVER,
    labels,
    metadata,
    non_root,
    role_to_read,
    to_yaml,
)
from tgi_cli.deploy.kubernetes.options import KubernetesOptions

GATEWAY = "inference-gateway"
"""Name of the Gateway that an HTTPRoute attaches to, as in the extension's guides."""

PICKER_IMAGE = "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.9.0"
SMG_IMAGE = "ghcr.io/smg-project/smg:1.13.0"

PICKER, SMG = "endpoint-picker", "smg"
"""``app.kubernetes.io/name`` of their pods."""

GATEWAY_KEY = "gateway-key"
"""Key of the Secret with the one API key that SMG knows."""

_PICKER_PORT, _PICKER_HEALTH_PORT, _PICKER_METRICS_PORT = 9002, 9003, 9090
_SMG_METRICS_PORT = 29000
_DISTROLESS_USER, _SMG_USER = 65532, 10001

_PATIENT = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
"""Of liveness: a restart cuts all streams, and the default timeout is a second."""

ENGINE_METRICS = {
    "queuedRequestsSpec": "tgi_queue_size",
    "runningRequestsSpec": "tgi_batch_current_size",
    "kvUsageSpec": "tgi_kv_cache_usage_ratio",
    "loraSpec": "tgi_lora_requests_info",
    "cacheInfoSpec": "tgi_cache_config_info",
    "cacheBlockSizeLabelName": "block_size",
    "cacheNumBlocksLabelName": "num_blocks",
}
"""The model server protocol of endpoint pickers under our names:
https://github.com/llm-d/llm-d-router, docs/model-server-protocol.md"""


def gateway_objects(deployment: Deployment, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The objects of the gateway that ``options`` name."""
    if options.gateway == "inference-pool":
        return _pool_objects(deployment, options)
    if options.gateway == "smg":
        return _smg_objects(deployment, options)
    return []


def _pool_objects(deployment: Deployment, options: KubernetesOptions) -> list[dict[str, Any]]:
    meta = metadata(deployment, options, "-epp", PICKER)
    resources = (
        ("", ("pods",)),
        ("inference.networking.k8s.io", ("inferencepools",)),
        ("llm-d.ai", ("inferenceobjectives", "inferencemodelrewrites")),
        ("inference.networking.x-k8s.io", ("inferenceobjectives", "inferencemodelrewrites")),
    )
    ports = [
        {"name": "grpc-ext-proc", "port": _PICKER_PORT},
        {"name": "http-metrics", "port": _PICKER_METRICS_PORT},
    ]
    return [
        inference_pool(deployment, options),
        http_route(deployment, options),
        *role_to_read(deployment, options, "-epp", PICKER, resources),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {"config.yaml": to_yaml(picker_config(options))},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"selector": labels(deployment, PICKER), "ports": ports},
        },
        _picker(deployment, options),
    ]


def inference_pool(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/"""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": metadata(deployment, options),
        "spec": {
            "selector": {"matchLabels": labels(deployment)},
            "targetPorts": [{"number": deployment.port}],
            "endpointPickerRef": {
                "name": f"{deployment.name}-epp",
                "port": {"number": _PICKER_PORT},
                # Requests go to any pod while the picker is away.
                "failureMode": "FailOpen",
            },
        },
    }


def http_route(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """All paths of the Gateway to the pool, without the time limit that proxies have for answers:
    https://gateway-api.sigs.k8s.io/api-types/httproute/"""
    backend = {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": deployment.name,
    }
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(deployment, options),
        "spec": {
            "parentRefs": [{"name": GATEWAY}],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [backend],
                    "timeouts": {"request": "0s"},
                }
            ],
        },
    }


def picker_config(options: KubernetesOptions) -> dict[str, Any]:
    """How the endpoint picker scores pods: prefix, queue and KV cache, and loaded adapters."""
    weights = {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2}
    if options.adapters:
        weights["lora-affinity-scorer"] = 1
    extractor = {
        "type": "core-metrics-extractor",
        "parameters": {
            "defaultEngine": SERVER,
            "engineConfigs": [{"name": SERVER} | ENGINE_METRICS],
        },
    }
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": "metrics-data-source"}, extractor]
        + [{"type": scorer} for scorer in weights],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [
                    {"pluginRef": scorer, "weight": weight} for scorer, weight in weights.items()
                ],
            }
        ],
    }


def _picker(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    probe = {"grpc": {"port": _PICKER_HEALTH_PORT, "service": "inference-extension"}}
    container = {
        "name": PICKER,
        "image": PICKER_IMAGE,
        "args": [
            f"--pool-name={deployment.name}",
            f"--pool-namespace={options.namespace}",
            "--pool-group=inference.networking.k8s.io",
            "--config-file=/config/config.yaml",
            f"--grpc-health-port={_PICKER_HEALTH_PORT}",
            "--metrics-endpoint-auth=false",
            "--tracing=false",
        ],
        "ports": [
            {"name": "grpc", "containerPort": _PICKER_PORT},
            {"name": "grpc-health", "containerPort": _PICKER_HEALTH_PORT},
            {"name": "metrics", "containerPort": _PICKER_METRICS_PORT},
        ],
        "livenessProbe": probe | _PATIENT | {"initialDelaySeconds": 5},
        "readinessProbe": probe | {"periodSeconds": 2, "timeoutSeconds": 2},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": SECURITY_CONTEXT,
        "volumeMounts": [{"name": "config", "mountPath": "/config", "readOnly": True}],
    }
    volume = {"name": "config", "configMap": {"name": f"{deployment.name}-epp"}}
    spec = {
        "serviceAccountName": f"{deployment.name}-epp",
        "securityContext": non_root(_DISTROLESS_USER),
        # Streams pass through it as long as the longest answer of a pod that drains.
        "terminationGracePeriodSeconds": deployment.stop_seconds,
        "containers": [container],
        "volumes": [volume],
    }
    return _deployment(deployment, options, "-epp", PICKER, spec, _PICKER_METRICS_PORT)


def _smg_objects(deployment: Deployment, options: KubernetesOptions) -> list[dict[str, Any]]:
    port = {"name": "http", "port": deployment.port, "targetPort": "http"}
    return [
        *role_to_read(deployment, options, "-gateway", SMG, (("", ("pods",)),)),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(deployment, options, "-gateway", SMG),
            "spec": {"selector": labels(deployment, SMG), "ports": [port]},
        },
        _smg(deployment, options),
    ]


def smg_arguments(deployment: Deployment, options: KubernetesOptions) -> list[str]:
    """SMG's flags, with the API key as a variable of its container.

    By default, a pod that was away for a moment gets no requests for a minute: health checks and
    an open circuit breaker both have that interval.
    """
    arguments = [
        "--host=0.0.0.0",
        f"--port={deployment.port}",
        "--policy=cache_aware",
        "--service-discovery",
        "--selector",
        *(f"{label}={value}" for label, value in labels(deployment).items()),
        f"--service-discovery-namespace={options.namespace}",
        f"--service-discovery-port={deployment.port}",
        "--disable-tokenizer-autoload",
        "--health-check-interval-secs=2",
        "--cb-timeout-duration-secs=5",
        f"--shutdown-grace-period-secs={deployment.drain_seconds}",
        f"--prometheus-port={_SMG_METRICS_PORT}",
    ]
    if API_KEY in deployment.secrets:
        arguments.append("--api-key=$(GATEWAY_KEY)")
    return arguments


def _smg(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    variables: list[dict[str, Any]] = []
    if API_KEY in deployment.secrets:
        key = {"secretKeyRef": {"name": deployment.name, "key": GATEWAY_KEY}}
        variables.append({"name": "GATEWAY_KEY", "valueFrom": key})
    settle = 5
    container = {
        "name": SMG,
        "image": SMG_IMAGE,
        "args": smg_arguments(deployment, options),
        "env": variables,
        "ports": [
            {"name": "http", "containerPort": deployment.port},
            {"name": "metrics", "containerPort": _SMG_METRICS_PORT},
        ],
        "livenessProbe": {"httpGet": {"path": "/liveness", "port": "http"}} | _PATIENT,
        "readinessProbe": {
            "httpGet": {"path": "/readiness", "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
        "lifecycle": {"preStop": {"sleep": {"seconds": settle}}},
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": SECURITY_CONTEXT,
    }
    spec = {
        "serviceAccountName": f"{deployment.name}-gateway",
        "securityContext": non_root(_SMG_USER),
        "terminationGracePeriodSeconds": settle + deployment.stop_seconds,
        "containers": [container],
    }
    return _deployment(deployment, options, "-gateway", SMG, spec, _SMG_METRICS_PORT)


def _deployment(
    deployment: Deployment,
    options: KubernetesOptions,
    suffix: str,
    program: str,
    spec: dict[str, Any],
    metrics_port: int,
) -> dict[str, Any]:
    """A deployment of one pod, since it keeps its index of prefixes in memory."""
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(metrics_port),
        "prometheus.io/path": "/metrics",
    }
    template = {
        "metadata": {"labels": labels(deployment, program), "annotations": annotations},
        "spec": spec,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, options, suffix, program),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels(deployment, program)},
            "template": template,
        },
    }
