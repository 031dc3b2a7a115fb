"""The reference in docs/configuration.md: ``python -m tgi_cli.cli.reference FILE``.

It is generated from the table of settings, between two comments of that file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tgi_cli.config.settings import SETTINGS
from tgi_cli.config.settings.setting import COMMANDS, COMPLETION, SERVE, Setting

BEGIN = "<!-- Written by `make reference` from tgi_cli/config/settings. -->"
END = "<!-- The end of that. -->"


def reference() -> str:
    """Markdown: a table for each panel of the commands' help."""
    visible = [s for s in SETTINGS if not s.hidden and COMPLETION not in s.commands]
    return "\n".join(
        line for _, panel in groupby(visible, attrgetter("panel")) for line in _table([*panel])
    )


def updated(text: str) -> str:
    """A page with its reference renewed. Raises ValueError if the comments are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the comments around the reference are missing")
    return f"{before}{begin}\n\n{reference()}\n{end}{after}"


def _table(settings: list[Setting]) -> Iterator[str]:
    commands = {setting.commands for setting in settings}
    only = "" if len(commands) > 1 or SERVE in settings[0].commands else _names(settings[0])
    yield f"### {settings[0].panel}{f' ({only})' if only else ''}"
    yield ""
    yield "| flag | variable | default | meaning |"
    yield "|---|---|---|---|"
    for setting in settings:
        cells = [cell.replace("|", "\\|") for cell in _row(setting, only)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _row(setting: Setting, only: str) -> tuple[str, str, str, str]:
    flags = [f"`-{setting.short}`"] if setting.short else []
    flags.append(setting.kind.metavar if setting.argument else f"`{setting.flag}`")
    if setting.negative_flag:
        flags.append(f"`{setting.negative_flag}`")
    default = setting.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    shown = "" if default in (None, (), "") else str(default)
    meaning = re.sub(r"(?<![\w`-])(--?[a-z][a-z-]*)", r"`\1`", setting.help)
    if not only and setting.commands != COMMANDS and SERVE not in setting.commands:
        meaning += f" ({_names(setting)})"
    return ", ".join(flags), ", ".join(setting.all_variables), shown, meaning


def _names(setting: Setting) -> str:
    return ", ".join(f"`tgi {name}`" for name in setting.commands)


def main(arguments: list[str]) -> None:
    """Renew the reference in a file."""
    if len(arguments) != 1:
        sys.exit("usage: python -m tgi_cli.cli.reference FILE")
    path = Path(arguments[0])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
