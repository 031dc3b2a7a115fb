"""``tgi serve --node-rank N`` for N > 0: a node that runs processes of a model, and no server."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tgi_cli.config import ServeConfig, check_settings
from tgi_cli.errors import ExitCode
from tgi_cli.process.authenticated_channel import read_secret
from tgi_cli.process.signals import delivered, exiting_on
from tgi_cli.process.spawn import run_in_fork
from tgi_cli.worker.tensor_parallel.node_agent import NodeAgent

log = logging.getLogger(__name__)


def serve_node(
    config: ServeConfig, locate: Callable[[ServeConfig], tuple[ServeConfig, Path]]
) -> int:
    """Run this node's processes for node 0 until a signal; returns the exit code.

    ``locate`` is that of :func:`tgi_cli.launcher.serve.serve`.

    Raises:
        TgiError: Settings contradict each other, the secret cannot be read, the model is
            unavailable, or node 0 refuses this node.
    """
    check_settings(config)
    assert config.node_secret_file is not None
    secret = read_secret(config.node_secret_file)
    with exiting_on(signal.SIGTERM, signal.SIGINT):
        config, model_path = run_in_fork(partial(locate, config))
        agent = NodeAgent(config, model_path, secret)

    def stop(number: signal.Signals) -> None:
        log.info("%s: stopping", number.name)
        agent.stop()

    with delivered((signal.SIGTERM, signal.SIGINT), stop):
        agent.run()
    log.info("stopped")
    return ExitCode.OK
