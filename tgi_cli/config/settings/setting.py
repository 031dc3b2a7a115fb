"""One thing that users may set: its names, its values, and which commands take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tgi_cli.config.settings.values import Kind

SERVE, SERVER, ROUTER = "serve", "model-server", "router"
WARMUP, DOWNLOAD = "warmup", "download-weights"
COMMANDS = (SERVE, SERVER, ROUTER, WARMUP, DOWNLOAD)
"""The commands that take settings; `tgi env` takes those of the first."""

MODEL = "Model"
NETWORK = "Network"
HALVES = "Between router and model server"
LIMITS = "Limits"
SCHEDULING = "Scheduling"
SUPERVISION = "Supervision"
CACHE = "Cache"
LOADING = "Loading"
FILES = "Files"
DEVICES = "Several devices"
ADAPTERS = "Adapters"
API = "Limits of a request"
CHAT = "Chats"
LOGS = "Logs"
ELSEWHERE = "Of Text Generation Inference, without effect"
PANELS = (
    MODEL,
    NETWORK,
    LIMITS,
    SCHEDULING,
    CACHE,
    LOADING,
    FILES,
    DEVICES,
    HALVES,
    SUPERVISION,
    ADAPTERS,
    API,
    CHAT,
    LOGS,
    ELSEWHERE,
)
"""In the order in which help shows them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Its flag is its name with dashes, its variable its name in capitals.

    Attributes:
        name: as in :class:`tgi_cli.config.ServeConfig` and its like, if it stands there.
        kind: of its values.
        default: where nothing is said; None: left open.
        help: a sentence or two.
        panel: under which heading help shows it.
        of: the commands that take it.
        short: a flag of one letter, without its dash.
        negative: of a switch: whether ``--no-...`` switches it off.
        argument: it is the command's argument rather than a flag.
        hidden: not for people: what a parent process tells its child.
        secret: not to be shown.
        variables: environment variables, the first that is set counts; None: its own alone.
        inherited: child processes keep the variable, for libraries that read it.
        note: what happens instead, where it has no effect.
        note_on: the commands where that is so; none: all.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    panel: str
    of: tuple[str, ...] = (SERVE,)
    short: str = ""
    negative: bool = False
    argument: bool = False
    hidden: bool = False
    secret: bool = False
    variables: tuple[str, ...] | None = None
    inherited: bool = False
    note: str = ""
    note_on: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Its long flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def all_variables(self) -> tuple[str, ...]:
        """Its environment variables, in the order in which they count."""
        return (self.name.upper(),) if self.variables is None else self.variables

    def idle(self, command: str) -> bool:
        """Whether it has no effect on a command."""
        return bool(self.note) and (not self.note_on or command in self.note_on)
