"""The commands of ``tgi``: where each is defined, and what the list of them says.

Only the one that runs is imported: help for all of them, and the start of each, stay quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One command.

    Attributes:
        name: as it is typed.
        help: the first sentence of its function's docstring.
        module, function: where it is defined.
        settings: whether its flags are those of the table of settings.
        kind: the name of a class of commands in the module; empty: Typer's own.
    """

    name: str
    help: str
    module: str = ""
    function: str = ""
    settings: bool = False
    kind: str = ""

    def load(self) -> tuple[Callable[..., Any], type | None]:
        """The function, and the class of commands that it is to be one of; None: Typer's."""
        name = self.name.replace("-", "_")
        module = import_module(f"tgi_cli.cli.{self.module or name}")
        kind = getattr(module, self.kind) if self.kind else None
        if self.settings:
            from tgi_cli.cli.settings_flags import SettingsCommand

            kind = SettingsCommand
        return getattr(module, self.function or name), kind


COMMANDS = (
    Entry("serve", "Serve a model over HTTP: TGI's API and OpenAI's.", settings=True),
    Entry(
        "env",
        "Show every setting of `tgi serve`, its value, and where it came from.",
        settings=True,
    ),
    Entry(
        "download-weights",
        "Download what serving a model needs; print the folder it is in.",
        settings=True,
    ),
    Entry(
        "warmup",
        "Compile and measure what a server would at its start, so that `tgi serve` starts faster.",
        settings=True,
    ),
    Entry("quantize", "Make a quantized checkpoint of a model, for tgi, vLLM and transformers."),
    Entry("bench", "Measure how fast a model, a shard or a server answers.", kind="BenchCommand"),
    Entry(
        "model-server",
        "Run a model behind a unix socket, for a router to connect to.",
        settings=True,
    ),
    Entry("router", "Serve HTTP in front of a model server.", settings=True),
    Entry(
        "completion",
        "Print the script that makes a shell complete tgi's commands and flags.",
        module="completions",
    ),
)
"""In the order in which help lists them."""
