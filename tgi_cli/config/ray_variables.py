"""Environment variables of Ray Serve's processes, in its own cluster and in pods."""

from __future__ import annotations

FAST_PATH = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Parts of answers pass between Ray's processes over gRPC instead of its object store, and between
no threads: a token costs a third of the CPU time (tests/benchmarks/ray_serve.py).
https://docs.ray.io/en/latest/serve/advanced-guides/performance.html"""

SERVE_VARIABLES = FAST_PATH | {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}
"""A replica that does not answer is killed: it would not finish its requests, and Ray would wait
for that as long as it lets them take before it starts another one."""
