"""A Ray cluster of several nodes that are all on this machine, as a process.

``python -m tests.tools.ray_nodes NODES CPUS`` prints a line of JSON with its ``address`` and the
process ids of its ``raylets``, the head's first. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster

_OBJECT_STORE_BYTES = 80 << 20


def main(nodes: int, cpus: int) -> None:
    """Start a cluster of ``nodes`` with ``cpus`` each, and wait."""
    arguments: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": _OBJECT_STORE_BYTES}
    cluster = Cluster(
        initialize_head=True, head_node_args={**arguments, "include_dashboard": False}
    )
    found: list[Any] = [cluster.head_node]
    found += [cluster.add_node(wait=False, **arguments) for _ in range(nodes - 1)]
    cluster.wait_for_nodes()
    raylets = [node.all_processes["raylet"][0].process.pid for node in found]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
