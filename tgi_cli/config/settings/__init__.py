"""Everything that users may set, in one table.

From it come the flags and variables of the commands, the keys of configuration files, the command
lines of child processes and the reference in docs/configuration.md.
"""

from tgi_cli.config.settings.devices import DEVICE_SETTINGS
from tgi_cli.config.settings.engine import ENGINE_SETTINGS
from tgi_cli.config.settings.halves import HALVES_SETTINGS
from tgi_cli.config.settings.inherited import INHERITED_SETTINGS, variable_notes
from tgi_cli.config.settings.router import MODEL_SETTINGS, ROUTER_SETTINGS
from tgi_cli.config.settings.setting import (
    COMMANDS,
    DOWNLOAD,
    PANELS,
    ROUTER,
    SERVE,
    SERVER,
    WARMUP,
    Setting,
)

SETTINGS = tuple(
    sorted(
        (
            *MODEL_SETTINGS,
            *ROUTER_SETTINGS,
            *ENGINE_SETTINGS,
            *DEVICE_SETTINGS,
            *HALVES_SETTINGS,
            *INHERITED_SETTINGS,
        ),
        key=lambda setting: PANELS.index(setting.panel),
    )
)


def settings_of(command: str) -> tuple[Setting, ...]:
    """The settings that a command takes, as its help shows them."""
    return tuple(setting for setting in SETTINGS if command in setting.of)


__all__ = [
    "COMMANDS",
    "DOWNLOAD",
    "PANELS",
    "ROUTER",
    "SERVE",
    "SERVER",
    "SETTINGS",
    "WARMUP",
    "Setting",
    "settings_of",
    "variable_notes",
]
