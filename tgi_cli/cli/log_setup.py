"""Configures the log of a command as ``--logger-level`` and ``--json-output`` request."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tgi_cli.errors import ConfigError

_TARGETS = {
    "text_generation_launcher": ("launcher",),
    "text_generation_router": ("router", "text"),
    "text_generation_router_v2": ("router", "text"),
    "text_generation_router_v3": ("router", "text"),
    "text_generation_server": ("model_server", "rpc", "tgi_grpc", "engine", "worker", "models"),
    "text_generation_benchmark": ("bench",),
}
"""TGI's targets in log filters, and the packages here that correspond to them."""


def set_up_logs(role: str, level: str, json_output: bool) -> None:
    """Configure this process's log.

    ``level`` may have directives: ``info,router=debug`` for a package of ``tgi_cli``,
    ``info,text_generation_router=debug`` as in TGI, or the name of any logger.

    Raises:
        ConfigError: an unknown level, or a directive that is not ``target=level``.
    """
    from tgi_cli import logging as logs

    if os.environ.get("LOG_COLORIZE") == "1":  # inverted, as in TGI
        os.environ["NO_COLOR"] = "1"
    try:
        directives = logs.parse_directives(level)
        logs.setup(role, level, json_output)
        for target, number in directives.items():
            for name in _loggers(target):
                logging.getLogger(name).setLevel(number)
    except ValueError as error:
        raise ConfigError(f"--logger-level: {error}") from error


def _loggers(target: str) -> list[str]:
    names = _TARGETS.get(target, (target.removeprefix("tgi_cli."),))
    root = Path(__file__).parents[1]
    return [f"tgi_cli.{name}" if (root / name.split(".")[0]).exists() else name for name in names]
