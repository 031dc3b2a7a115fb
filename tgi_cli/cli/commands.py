"""The commands of ``tgi``: where each is defined, and how the list of commands describes it.

Only the command that runs is imported, so that help and startup stay fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer


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


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command.

    Attributes:
        name: its name on the command line.
        help: the first sentence of its function's docstring.
        module: the module in ``tgi_cli.cli``, in which a function has the command's name.
            Default: that name, too.
    """

    name: str
    help: str
    module: str = ""

    def load(self) -> tuple[Callable[..., Any], type]:
        """Import the function and the command class."""
        name = self.name.replace("-", "_")
        module = import_module(f"tgi_cli.cli.{self.module or name}")
        function = getattr(module, name)
        return function, function.command_class


COMMANDS = (
    CommandEntry("serve", "Serve a model over HTTP: the APIs of TGI, OpenAI and Anthropic."),
    CommandEntry("env", "Show every setting of `tgi serve`, its value and its source."),
    CommandEntry(
        "download-weights", "Download the files that serving a model needs; print their folder."
    ),
    CommandEntry(
        "warmup",
        "Compile kernels and measure limits ahead of time, so that `tgi serve` starts faster.",
    ),
    CommandEntry(
        "quantize", "Create a quantized checkpoint of a model, for tgi, vLLM and transformers."
    ),
    CommandEntry("bench", "Benchmark a model, a shard or a server."),
    CommandEntry("model-server", "Run a model behind a unix socket, for a router to connect to."),
    CommandEntry("router", "Serve HTTP in front of a model server."),
    CommandEntry(
        "connect", "Print or write the settings that make a client use a server, as Codex's."
    ),
    CommandEntry(
        "deploy", "Print the file that runs a server under Docker, Compose, systemd or Kubernetes."
    ),
    CommandEntry(
        "completion",
        "Print the script that completes tgi's commands and flags in a shell.",
        module="completions",
    ),
)
"""In the order in which help lists them."""
