"""The commands of ``tgi``: where each is defined, and how the list of commands describes it.

Only the command that runs is imported, so that help and startup stay fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from tgi_cli.cli import help


class _PlainHelp:
    """A command whose ``--help`` has a default.

    Without one, Typer validates its value with pydantic, whose import takes 14 MB and 0.1 s.
    """

    def get_help_option(self, context: Any) -> Any:
        option = super().get_help_option(context)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class PlainCommand(_PlainHelp, typer.core.TyperCommand):
    """A command."""


class PlainGroup(_PlainHelp, typer.core.TyperGroup):
    """The group of all commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for entry in COMMANDS:
            groups[entry.group].append((entry.name, entry.help))
        about = self.callback.__doc__ or ""
        formatter.write(help.command_list(about, {n: rows for n, rows in groups.items() if rows}))


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command.

    Attributes:
        name: its name on the command line.
        help: the first sentence of its function's docstring.
        group: the heading in ``GROUPS`` under which the help of ``tgi`` lists it.
        module: the module in ``tgi_cli.cli``, in which a function has the command's name.
            Default: that name, too.
    """

    name: str
    help: str
    group: str = "Tools"
    module: str = ""

    def load(self) -> tuple[Callable[..., Any], type]:
        """Import the function and the command class."""
        name = self.name.replace("-", "_")
        module = import_module(f"tgi_cli.cli.{self.module or name}")
        function = getattr(module, name)
        return function, function.command_class


GROUPS = ("Serve", "Prepare", "Measure", "Tools", "Parts of a server")
"""The headings of the help of ``tgi``, in their order."""

COMMANDS = (
    CommandEntry("serve", "Serve a model: the APIs of TGI, OpenAI and Anthropic.", "Serve"),
    CommandEntry("chat", "Chat with a model in the terminal, or in a pipe.", "Serve"),
    CommandEntry("env", "Show every setting of `tgi serve`, its value and its source.", "Serve"),
    CommandEntry("download-weights", "Download a model; print the folder of its files.", "Prepare"),
    CommandEntry("warmup", "Compile and measure ahead for a faster `tgi serve`.", "Prepare"),
    CommandEntry("quantize", "Create a quantized checkpoint of a model.", "Prepare"),
    CommandEntry("bench", "Benchmark a model, a shard or a server.", "Measure"),
    CommandEntry(
        "model-server", "Run a model behind a unix socket, for a router.", "Parts of a server"
    ),
    CommandEntry("router", "Serve HTTP in front of a model server.", "Parts of a server"),
    CommandEntry("connect", "Print or write the settings of a client, such as Codex."),
    CommandEntry("deploy", "Print files for Docker or Kubernetes, or deploy on Ray."),
    CommandEntry(
        "completion", "Print the script that completes commands in a shell.", module="completions"
    ),
)
"""The commands, in the order in which help lists them."""
