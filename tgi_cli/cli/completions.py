"""``tgi completion SHELL``, and the scripts of completions/: ``python -m tgi_cli.cli.completions``.

The scripts contain all commands and flags, so that completion starts no Python process, unlike
with the scripts of Typer and click.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tgi_cli.cli import shells
from tgi_cli.cli.commands import COMMANDS
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.cli.shells import CommandWords
from tgi_cli.config.settings.setting import COMPLETION, Setting
from tgi_cli.config.settings.values import SWITCH

SCRIPTS = {
    "bash": ("tgi.bash", shells.bash),
    "zsh": ("_tgi", shells.zsh),
    "fish": ("tgi.fish", shells.fish),
    "powershell": ("tgi.ps1", shells.powershell),
}
"""By shell: the file name under which it looks for the script, and the function that writes it."""

_HELP = Setting(SWITCH, "Show help", name="help", short="h")
_ROOT_SETTINGS = (
    Setting(SWITCH, "Print the version", name="version", short="V"),
    Setting(SWITCH, "Print the traceback of an error", name="traceback"),
    _HELP,
)


@takes(COMPLETION)
def completion(settings: ParsedSettings) -> None:
    """Print the script that completes tgi's commands and flags in a shell.

    For bash, zsh and fish, save it where the shell looks for completions; for PowerShell, add it
    to the profile.
    """
    print(script(settings["shell"]), end="")


def script(shell: str) -> str:
    """The completion script of a shell."""
    commands = []
    for entry in COMMANDS:
        function, _ = entry.load()
        settings: tuple[Setting, ...] = function.settings  # type: ignore[attr-defined]
        visible = tuple(setting for setting in settings if not setting.hidden)
        commands.append(CommandWords(entry.name, entry.help.rstrip("."), (*visible, _HELP)))
    _, write = SCRIPTS[shell]
    return write(CommandWords("tgi", "", _ROOT_SETTINGS), commands)


def main(arguments: list[str]) -> None:
    """Write all scripts into a folder."""
    if len(arguments) != 1:
        sys.exit("usage: python -m tgi_cli.cli.completions FOLDER")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for shell, (name, _) in SCRIPTS.items():
        (folder / name).write_text(script(shell), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
