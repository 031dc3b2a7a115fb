"""The reference of all settings in docs/configuration.md: ``python -m tgi_cli.cli.reference FILE``.

It is written from the table of settings, between two comments of that file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tgi_cli.config.settings import COMMANDS, PANELS, SERVE, SETTINGS, Setting

BEGIN = "<!-- Written by `make reference` from tgi_cli/config/settings. -->"
END = "<!-- The end of that. -->"


def reference() -> str:
    """Markdown: a table for each panel of the commands' help."""
    return "\n".join(line for panel in PANELS for line in _panel(panel))


def updated(text: str) -> str:
    """A page with the reference in it renewed. Raises ValueError where the comments are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the comments around the reference are missing")
    return f"{before}{begin}\n\n{reference()}\n{end}{after}"


def _panel(panel: str) -> Iterator[str]:
    yield f"### {panel}"
    yield ""
    yield "| flag | variable | default | meaning |"
    yield "|---|---|---|---|"
    for setting in SETTINGS:
        if setting.panel == panel and not setting.hidden:
            flag, variable, default, meaning = map(_cell, _row(setting))
            yield f"| {flag} | {variable} | {default} | {meaning} |"
    yield ""


def _row(setting: Setting) -> tuple[str, str, str, str]:
    flags = [f"`-{setting.short}`"] if setting.short else []
    flags.append("MODEL" if setting.argument else f"`{setting.flag}`")
    if setting.negative:
        flags.append(f"`--no-{setting.flag[2:]}`")
    default = setting.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    meaning = re.sub(r"(?<![\w`-])(--?[a-z][a-z-]*)", r"`\1`", setting.help)
    if setting.of != COMMANDS and SERVE not in setting.of:
        meaning += f" ({', '.join(f'`tgi {name}`' for name in setting.of)})"
    variables = ", ".join(setting.all_variables)
    return ", ".join(flags), variables, "" if default in (None, ()) else str(default), meaning


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> None:
    """Renew the reference in the one file that is named."""
    if len(arguments) != 1:
        sys.exit("usage: python -m tgi_cli.cli.reference FILE")
    path = Path(arguments[0])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
