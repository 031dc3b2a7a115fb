"""All settings that users can make, in one table.

Flags, environment variables, keys of configuration files, defaults, shell completions and the
reference in docs/configuration.md are generated from it.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.config.settings.bench import BENCH_SETTINGS
from tgi_cli.config.settings.chat import CHAT_SETTINGS
from tgi_cli.config.settings.connect import CONNECT_SETTINGS
from tgi_cli.config.settings.connection import CONNECTION_SETTINGS
from tgi_cli.config.settings.deploy import DEPLOY_SETTINGS, KUBERNETES_SETTINGS
from tgi_cli.config.settings.engine import ENGINE_SETTINGS
from tgi_cli.config.settings.inherited import INHERITED_SETTINGS
from tgi_cli.config.settings.model import LOADING_SETTINGS, MODEL_SETTINGS
from tgi_cli.config.settings.multi_model import MULTI_MODEL_SETTINGS
from tgi_cli.config.settings.quantize import COMPLETION_SETTINGS, QUANTIZE_SETTINGS
from tgi_cli.config.settings.ray import RAY_SETTINGS
from tgi_cli.config.settings.router import NETWORK_SETTINGS, ROUTER_SETTINGS
from tgi_cli.config.settings.setting import DEPLOY, SERVE, Setting

SETTINGS: tuple[Setting, ...] = (
    *MODEL_SETTINGS,
    *NETWORK_SETTINGS,
    *ENGINE_SETTINGS,
    *LOADING_SETTINGS,
    *ROUTER_SETTINGS,
    *CONNECTION_SETTINGS,
    *MULTI_MODEL_SETTINGS,
    *RAY_SETTINGS,
    *INHERITED_SETTINGS,
    *BENCH_SETTINGS,
    *QUANTIZE_SETTINGS,
    *CHAT_SETTINGS,
    *CONNECT_SETTINGS,
    *DEPLOY_SETTINGS,
    *KUBERNETES_SETTINGS,
    *COMPLETION_SETTINGS,
)
"""The panels of settings, in the order in which help shows them."""


def settings_of(command: str) -> tuple[Setting, ...]:
    """The settings of a command, in the order in which its help shows them."""
    own = tuple(setting for setting in SETTINGS if command in setting.commands)
    return (*own, *settings_of(SERVE)) if command == DEPLOY else own


def default(name: str, command: str = SERVE) -> Any:
    """The default of a setting, for the dataclasses that are made from settings."""
    return next(s.default for s in SETTINGS if s.name == name and command in s.commands)
