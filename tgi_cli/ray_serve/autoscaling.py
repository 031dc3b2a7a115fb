"""How many replicas a deployment should have.

Ray sends this module's source to its controller, so that it imports nothing of this package.
"""

from __future__ import annotations

from typing import Any

KV_USAGE = "kv_usage"
"""A replica's custom metric: share of its KV cache that requests hold."""


class LoadPolicy:
    """Scales on the number of requests and on the use of the KV caches, whichever needs more.

    Ray applies delays, factors and bounds to what it returns; see
    https://docs.ray.io/en/latest/serve/advanced-guides/advanced-autoscaling.html.

    Args:
        target_kv_usage: Share of the KV cache that requests of a replica should hold on average.
    """

    def __init__(self, target_kv_usage: float) -> None:
        self._target_kv_usage = target_kv_usage

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, and no state to keep.

        Args:
            context: Ray's ``AutoscalingContext``. Its requests are those that run on a replica or
                wait for one.
        """
        by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        usages = (context.aggregated_metrics or {}).get(KV_USAGE, {}).values()
        by_kv_usage = sum(usages) / self._target_kv_usage
        return max(by_requests, by_kv_usage), {}
