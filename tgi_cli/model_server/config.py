"""The configuration of a model server's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tgi_cli.config import ServeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServerConfig:
    """What a model server serves, and where.

    Attributes:
        serve: The settings; each adapter is ``name=path``.
        model_path: The model's folder.
        uds_path: Unix socket to listen on.
        parent_fd: Pipe that closes when the parent is gone, or None to run alone.
        heartbeat_fd: Memory for the heartbeat, or None if no launcher watches.
        replica: Number among its replicas, for its log; None if there are none.
        cpus: Logical CPUs that its threads may use; empty for all.
    """

    serve: ServeConfig
    model_path: Path
    uds_path: Path
    parent_fd: int | None = None
    heartbeat_fd: int | None = None
    replica: int | None = None
    cpus: tuple[int, ...] = ()
