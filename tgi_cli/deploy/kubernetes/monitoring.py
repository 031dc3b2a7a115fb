"""Objects of the Prometheus operator, and Grafana's dashboard for its sidecar.

https://prometheus-operator.dev/docs/api-reference/api/
"""

from __future__ import annotations

from typing import Any

from tgi_cli.deploy.deployment import Deployment
from tgi_cli.deploy.kubernetes.objects import labels, metadata
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.monitoring.alerts import alert_rules
from tgi_cli.deploy.monitoring.dashboard import dashboard_json

DASHBOARD_LABEL = "grafana_dashboard"
"""Label by which the sidecar of Grafana's chart finds dashboards."""


def monitoring_objects(deployment: Deployment, options: KubernetesOptions) -> list[dict[str, Any]]:
    """A PodMonitor, a PrometheusRule and a dashboard, if ``options`` ask for them."""
    if not options.monitoring:
        return []
    dashboard = metadata(deployment, options, "-dashboard")
    dashboard["labels"] = dashboard["labels"] | {DASHBOARD_LABEL: "1"}
    return [
        pod_monitor(deployment, options),
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": metadata(deployment, options),
            "spec": alert_rules(),
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": dashboard,
            "data": {"tgi.json": dashboard_json()},
        },
    ]


def pod_monitor(deployment: Deployment, options: KubernetesOptions) -> dict[str, Any]:
    """Pods rather than the Service are scraped, as load is a pod's."""
    matched = labels(deployment)
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(deployment, options),
        "spec": {
            "selector": {"matchLabels": matched},
            "podTargetLabels": list(matched),
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }
