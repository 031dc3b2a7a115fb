"""``tgi env``: what `tgi serve` would be told, and by whom."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings import SERVE, Setting

HIDDEN = "********"
"""What is shown in place of a secret."""
_HEADS = ("setting", "value", "from")


@takes(SERVE)
def env(given: ParsedSettings) -> None:
    """Show every setting of `tgi serve`, its value, and where it came from.

    Takes the same flags, variables and file as `tgi serve`, and starts nothing. What is left open
    is settled when a model is loaded.
    """
    shown = [
        setting
        for setting in given.settings
        if not (setting.hidden or setting.argument or setting.name in ("config", "env"))
    ]
    if given["json_output"]:
        told = {
            setting.name: {
                "value": _plain(_value(given, setting)),
                "source": given.origins[setting.name].kind,
                "name": given.origins[setting.name].name or None,
            }
            for setting in shown
        }
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return
    rows = [
        (setting.flag, _spelled(_value(given, setting)), str(given.origins[setting.name]))
        for setting in shown
    ]
    if sys.stdout.isatty():
        _table(rows)
    else:
        widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
        for row in (_HEADS, *rows):
            line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            print(line.rstrip())


def _value(given: ParsedSettings, setting: Setting) -> Any:
    value = given[setting.name]
    return HIDDEN if setting.secret and value else value


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _spelled(value: Any) -> str:
    if value is None or value in ((), []):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _table(rows: list[tuple[str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*_HEADS, box=None, pad_edge=False)
    for flag, value, origin in rows:
        style = "dim" if origin == "default" else None
        table.add_row(flag, value, origin, style=style)
    Console(soft_wrap=True).print(table)
