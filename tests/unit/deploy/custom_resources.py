"""Reduced schemas of the custom resources that `tgi deploy k8s` writes.

Each has the fields that we use and no others, as the CRD named above it declares them.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
LABEL: Schema = {
    "type": "string",
    "maxLength": 63,
    "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def record(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def items(schema: Schema, low: int = 1, high: int = 64) -> Schema:
    return {"type": "array", "items": schema, "minItems": low, "maxItems": high}


LABELS: Schema = {"type": "object", "additionalProperties": LABEL, "minProperties": 1}
SELECTOR = record({"matchLabels": LABELS})
METADATA = record({"name": NAME}, namespace=NAME, labels=LABELS)


def resource(group: str, kind: str, spec: Schema) -> Schema:
    return record(
        {
            "apiVersion": {"const": group},
            "kind": {"const": kind},
            "metadata": METADATA,
            "spec": spec,
        }
    )


# https://github.com/kubernetes-sigs/gateway-api-inference-extension, v1:
# inference.networking.k8s.io_inferencepools.yaml
INFERENCE_POOL = resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    record(
        {
            "selector": SELECTOR,
            "targetPorts": items(record({"number": PORT}), high=8),
            "endpointPickerRef": record(
                {"name": NAME, "port": record({"number": PORT})},
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        }
    ),
)

# https://github.com/kubernetes-sigs/gateway-api, v1: gateway.networking.k8s.io_httproutes.yaml
_MATCH = record(
    {"path": record({"type": {"enum": ["Exact", "PathPrefix"]}, "value": {"pattern": "^/"}})}
)
HTTP_ROUTE = resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    record(
        {
            "parentRefs": items(record({"name": NAME}), high=32),
            "rules": items(
                record(
                    {
                        "matches": items(_MATCH),
                        "backendRefs": items(record({"group": NAME, "kind": TEXT, "name": NAME})),
                        "timeouts": record(
                            {"request": {"pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}}
                        ),
                    }
                ),
                high=16,
            ),
        }
    ),
)

# https://github.com/kedacore/keda: keda.sh_scaledobjects.yaml; values of a trigger are strings
_POLICY = record({"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": COUNT})
_SCALING = record({"stabilizationWindowSeconds": COUNT, "policies": items(_POLICY)})
SCALED_OBJECT = resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    record(
        {
            "scaleTargetRef": record({"name": NAME}, apiVersion=TEXT, kind=TEXT),
            "triggers": items(
                record(
                    {"type": {"const": "prometheus"}, "metadata": TEXTS},
                    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
                )
            ),
        },
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        advanced=record(
            {
                "horizontalPodAutoscalerConfig": record(
                    {"behavior": record({"scaleUp": _SCALING, "scaleDown": _SCALING})}
                )
            }
        ),
    ),
)

# https://github.com/prometheus-operator/prometheus-operator:
# monitoring.coreos.com_podmonitors.yaml, monitoring.coreos.com_prometheusrules.yaml
_DURATION: Schema = {"pattern": r"^(0|[0-9]+(ms|s|m|h|d))$"}
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    record(
        {
            "selector": SELECTOR,
            "podMetricsEndpoints": items(
                record({"port": TEXT}, path={"pattern": "^/"}, interval=_DURATION)
            ),
        },
        podTargetLabels=items(TEXT),
    ),
)
PROMETHEUS_RULE = resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    record(
        {
            "groups": items(
                record(
                    {
                        "name": TEXT,
                        "rules": items(
                            record(
                                {"alert": TEXT, "expr": TEXT},
                                **{"for": _DURATION, "labels": TEXTS, "annotations": TEXTS},
                            )
                        ),
                    }
                )
            )
        }
    ),
)

# https://github.com/kubernetes-sigs/lws: leaderworkerset.x-k8s.io_leaderworkersets.yaml; its pods
# are checked as those of a Deployment
LEADER_WORKER_SET = resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    record(
        {
            "leaderWorkerTemplate": record(
                {"workerTemplate": {"type": "object"}, "size": COUNT},
                leaderTemplate={"type": "object"},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            ),
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        },
        replicas=COUNT,
    ),
)

SCHEMAS: dict[str, Schema] = {
    schema["properties"]["kind"]["const"]: schema
    for schema in (
        INFERENCE_POOL,
        HTTP_ROUTE,
        SCALED_OBJECT,
        LEADER_WORKER_SET,
        POD_MONITOR,
        PROMETHEUS_RULE,
    )
}
