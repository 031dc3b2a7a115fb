"""Starts the processes of a server: commands of this package that read a struct."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from tgi_cli.config import ServeConfig
from tgi_cli.errors import ShardError, TgiError
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.model_server.config import ModelServerConfig
from tgi_cli.process.heartbeat import SharedHeartbeat
from tgi_cli.process.spawn import module_command, write_config


def start_model_server(
    config: ModelServerConfig, variables: Mapping[str, str]
) -> tuple[ChildProcess, SharedHeartbeat]:
    """Start a model server; returns its process and its heartbeat.

    Args:
        config: Configuration of the model server, but for its heartbeat. It has a parent's pipe.
        variables: Environment variables besides the inherited ones.
    """
    parent_fd = config.parent_fd
    assert parent_fd is not None
    heartbeat = SharedHeartbeat.create()
    config = replace(config, heartbeat_fd=heartbeat.fd)
    fds = (parent_fd, heartbeat.fd)
    child = start_command(
        "model-server", ShardError, config, fds, variables, config.serve, config.replica
    )
    heartbeat.close_fd()
    return child, heartbeat


def start_command(
    command: str,
    failure: type[TgiError],
    config: object,
    fds: tuple[int, ...],
    variables: Mapping[str, str],
    shared: ServeConfig,
    replica: int | None = None,
) -> ChildProcess:
    """Start ``tgi COMMAND``, which reads ``config`` from an inherited descriptor."""
    role = command if replica is None else f"{command} {replica}"
    config_fd = write_config(config)
    # The model is shown in lists of processes; how to report errors is known before the rest.
    words = [command, shared.model_id, f"--config-fd={config_fd}"]
    if shared.json_output:
        words.append("--json-output")
    try:
        return ChildProcess(
            role.replace("-", " "),
            failure,
            module_command("tgi_cli", *words),
            (*fds, config_fd),
            variables,
            role if shared.json_output else None,
        )
    finally:
        os.close(config_fd)
