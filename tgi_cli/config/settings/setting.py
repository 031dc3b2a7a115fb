"""One setting: its names, its values, and which commands take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tgi_cli.config.settings.values import ValueKind

SERVE, SERVER, ROUTER = "serve", "model-server", "router"
WARMUP, DOWNLOAD = "warmup", "download-weights"
SERVING = (SERVE, SERVER, ROUTER, WARMUP, DOWNLOAD)
"""Commands whose settings all have environment variables."""

BENCH, QUANTIZE = "bench", "quantize"
COMMANDS = (*SERVING, BENCH, QUANTIZE)
"""Commands that take ``--config``; a configuration file may have a section for each."""

VIEW, COMPARE, COMPLETION = "bench view", "bench compare", "completion"
CONNECT = "connect"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Its flag is its name with dashes, its variable its name in capitals.

    Attributes:
        name: its key, and the field of :class:`tgi_cli.config.ServeConfig` and its like.
        kind: the kind of its values.
        default: its value if it is not set, or None if that depends on model or device.
        help: one or two sentences.
        commands: the commands that take it.
        panel: the heading under which help shows it.
        short: a one-letter flag, without its dash.
        negative: the flag that switches it off; True: ``--no-...``.
        argument: whether it is a positional argument.
        required: whether the command fails without it.
        alias_of: the setting that it is another name of.
        hidden: whether help and configuration files omit it.
        secret: whether to mask its value.
        variables: environment variables, by precedence. Default: its name in capitals.
        inherited: whether child processes keep the variable, for libraries that read it.
        note: what happens instead, if it has no effect.
        note_on: the commands on which it has no effect; empty: all.
    """

    name: str
    kind: ValueKind
    default: Any
    help: str
    commands: tuple[str, ...] = ()
    panel: str = ""
    short: str = ""
    negative: str | bool = False
    argument: bool = False
    required: bool = False
    alias_of: str = ""
    hidden: bool = False
    secret: bool = False
    variables: tuple[str, ...] | None = None
    inherited: bool = False
    note: str = ""
    note_on: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags: long, negative and short."""
        short = f"-{self.short}" if self.short else ""
        return tuple(filter(None, (self.flag, self.negative_flag, short)))

    @property
    def negative_flag(self) -> str:
        """The flag that switches it off, or an empty string."""
        return f"--no-{self.flag[2:]}" if self.negative is True else self.negative or ""

    @property
    def all_variables(self) -> tuple[str, ...]:
        """The environment variables, by precedence."""
        return (self.name.upper(),) if self.variables is None else self.variables

    def has_no_effect(self, command: str) -> bool:
        return bool(self.note) and (not self.note_on or command in self.note_on)


def panel(
    title: str,
    commands: tuple[str, ...],
    *settings: Setting,
    variables: tuple[str, ...] | None = None,
) -> tuple[Setting, ...]:
    """Settings under one heading, with ``commands`` and ``variables`` where they have none."""
    return tuple(
        replace(
            setting,
            panel=title,
            commands=setting.commands or commands,
            variables=variables if setting.variables is None else setting.variables,
        )
        for setting in settings
    )
