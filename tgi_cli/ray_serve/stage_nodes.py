"""The pipeline stages of a replica besides its last one, each an actor of Ray on some node.

The actors are in the replica's placement group and end with the replica. A stage whose process dies
is started again with the replica's model server; if its actor or its machine is lost, the replica
fails, and Ray places another one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tgi_cli import logging as logs
from tgi_cli.config import ServeConfig
from tgi_cli.errors import ShardError, TgiError
from tgi_cli.process.cores import usable_cores
from tgi_cli.ray_serve.config import Bundle
from tgi_cli.worker.tensor_parallel.node_agent import NodeAgent

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNodeConfig:
    """What the stages serve.

    Attributes:
        serve: Settings of the model server, of which ``node_rank`` is filled in.
        secret: By which the nodes authenticate each other.
        bundle: Ray's resources of each stage.
        locate: Finds or downloads the model; see :func:`tgi_cli.launcher.serve.serve`.
    """

    serve: ServeConfig
    secret: str = field(repr=False)
    bundle: Bundle
    locate: Callable[[ServeConfig], tuple[ServeConfig, Path]]


class StageNode:
    """Ray's actor for one stage, whose shards are its child processes."""

    def run(self, config: StageNodeConfig) -> None:
        """Run the processes until the actor is killed.

        Raises:
            TgiError: The model is unavailable on this node, or the replica refuses it.
        """
        serve = config.serve
        logs.setup(f"node {serve.node_rank}", serve.logger_level, serve.json_output)
        variables = thread_variables(serve, config.bundle)
        found, path = config.locate(serve)
        NodeAgent(found, path, config.secret.encode(), variables).run()


class StageNodes:
    """The actors of a replica, which is in the first bundle of its placement group.

    Args:
        config: Of the stages.
        on_failure: Called from a thread when one of them is lost.
    """

    def __init__(self, config: StageNodeConfig, on_failure: Callable[[TgiError], None]) -> None:
        self._on_failure = on_failure
        self._closed = threading.Event()
        self._actors: list[Any] = []
        bundle = config.bundle
        make: Any = ray.remote(StageNode)
        for rank in range(1, bundle.stages):
            actor = make.options(
                num_cpus=bundle.cpus,
                num_gpus=bundle.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    get_current_placement_group(), placement_group_bundle_index=rank
                ),
            ).remote()
            self._actors.append(actor)
            running = actor.run.remote(replace(config, serve=replace(config.serve, node_rank=rank)))
            threading.Thread(
                target=self._await, args=(rank, running), name=f"node {rank}", daemon=True
            ).start()

    def close(self) -> None:
        """End the actors."""
        self._closed.set()
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)

    def _await(self, rank: int, running: Any) -> None:
        """Report how an actor has ended."""
        try:
            ray.get(running)
            cause = "has ended"
        except RayTaskError as error:
            found = error.cause
            cause = str(found if isinstance(found, Exception) else error).strip().splitlines()[-1]
        except RayActorError:
            cause = "is gone"
        except RayError as error:
            cause = type(error).__name__
        if not self._closed.is_set():
            self._on_failure(
                ShardError(f"node {rank} of the replica: {cause}", "see its log, and Ray's")
            )


def thread_variables(serve: ServeConfig, bundle: Bundle) -> dict[str, str]:
    """Limit the threads of a stage's processes to its CPUs, if it has not all of the machine's.

    Ray sets the variable in this process to the same number, from which each shard would take it.
    """
    os.environ.pop(_THREADS, None)
    if bundle.gpus or bundle.cpus >= len(usable_cores()):
        return {}
    return {_THREADS: str(max(1, bundle.cpus // (serve.num_shard or 1)))}
