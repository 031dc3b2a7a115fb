"""One setting: its names, its values, and which commands take it."""

from __future__ import annotations

from collections.abc import Mapping
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
CONNECT, DEPLOY, CHAT = "connect", "deploy", "chat"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Its flag is its name with dashes, its variable its name in capitals.

    Attributes:
        kind: the kind of its values.
        help: one or two sentences.
        brief: a few words instead, for the page of common flags; empty for flags that only the
            whole help shows.
        default: its value if it is not set, or None if that depends on model or device. Default:
            that of its kind.
        name: its key, and the field of :class:`tgi_cli.config.ServeConfig` and its like.
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
        note: what happens instead, if it has no effect; by command, if it has one on others.
    """

    kind: ValueKind
    help: str
    default: Any = None
    brief: str = ""
    name: str = ""
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
    note: str | Mapping[str, str] = ""

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

    def note_for(self, command: str) -> str:
        """What happens instead on a command, or an empty string if it has its effect there."""
        return self.note if isinstance(self.note, str) else self.note.get(command, "")


def panel(
    title: str,
    commands: tuple[str, ...],
    *,
    variables: tuple[str, ...] | None = None,
    **settings: Setting,
) -> tuple[Setting, ...]:
    """Settings by name under one heading, with ``commands`` and ``variables`` if they have none."""
    return tuple(
        replace(
            setting,
            name=name,
            default=setting.kind.default if setting.default is None else setting.default,
            panel=title,
            commands=setting.commands or commands,
            variables=variables if setting.variables is None else setting.variables,
        )
        for name, setting in settings.items()
    )
