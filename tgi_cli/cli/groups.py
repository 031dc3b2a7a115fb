"""The kinds of commands that start without what they do not need."""

from __future__ import annotations

from typing import Any

import typer


class _PlainHelp:
    """A command whose ``--help`` is off unless it is given.

    Left open, its value is one that Typer wants to check; what checks values is pydantic, which
    takes 14 MB and a tenth of a second.
    """

    def get_help_option(self, context: Any) -> Any:
        """The flag, with a default."""
        option = super().get_help_option(context)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class PlainCommand(_PlainHelp, typer.core.TyperCommand):
    """One command."""


class PlainGroup(_PlainHelp, typer.core.TyperGroup):
    """All of them."""
