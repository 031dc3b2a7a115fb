"""``tgi env``: the settings that `tgi serve` would use, and where they come from."""

from __future__ import annotations

import json
import sys
from typing import Any

from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import SERVE, Setting

HIDDEN = "********"
"""Shown instead of a secret."""
_HEADS = ("setting", "value", "from")


@takes(SERVE, ("PORT=8080 tgi env --config tgi.yaml", "what a server would use"))
def env(settings: ParsedSettings) -> None:
    """Show every setting of `tgi serve`, its value and its source.

    Takes the same flags, variables and file as `tgi serve`, and starts nothing. Defaults that
    depend on the model are resolved when it is loaded.
    """
    shown = [
        setting
        for setting in settings.settings
        if not (setting.hidden or setting.argument or setting.name in ("config", "env"))
    ]
    if settings["json_output"]:
        values = {
            setting.name: {
                "value": _value(settings, setting),
                "source": settings.origins[setting.name].kind,
                "name": settings.origins[setting.name].name or None,
            }
            for setting in shown
        }
        print(json.dumps(values, indent=2, ensure_ascii=False, default=str))
        return
    rows = [
        (setting.flag, _format(_value(settings, setting)), str(settings.origins[setting.name]))
        for setting in shown
    ]
    if sys.stdout.isatty():
        _print_table(rows)
    else:
        widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
        for row in (_HEADS, *rows):
            line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            print(line.rstrip())


def _value(settings: ParsedSettings, setting: Setting) -> Any:
    value = settings[setting.name]
    return HIDDEN if setting.secret and value else value


def _format(value: Any) -> str:
    if value is None or value in ((), []):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in _HEADS:
        # A long value takes several lines; nothing is cut off.
        table.add_column(head, no_wrap=head != "value", overflow="fold")
    for flag, value, origin in rows:
        table.add_row(flag, value, origin, style="dim" if origin == "default" else None)
    Console().print(table)
