"""``tgi completion SHELL``, and the scripts of completions/: ``python -m tgi_cli.cli.completions``.

The scripts contain all commands and flags, so that completion starts no Python process, unlike
with the scripts of Typer and click. Their templates are in completion_scripts/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from tgi_cli.cli.commands import COMMANDS
from tgi_cli.cli.help import paragraphs
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import COMPLETION, Setting
from tgi_cli.config.settings.values import SWITCH

SCRIPTS = {"bash": "tgi.bash", "zsh": "_tgi", "fish": "tgi.fish", "powershell": "tgi.ps1"}
"""File names of scripts and of their templates, by shell (bash 3.2, PowerShell 5.1 and later).
Shells look for scripts of these names."""

_HEADER = "# Completes tgi's commands and flags. Written by `make completions`."
_HELP = Setting(SWITCH, "Show help", name="help", short="h")
_HELP_ALL = Setting(SWITCH, "Show all flags", name="help_all")
_ROOT_SETTINGS = (
    Setting(SWITCH, "Print the version", name="version", short="V"),
    Setting(SWITCH, "Print the traceback of an error", name="traceback"),
    _HELP,
)
_FILES = ("FILE", "PATH")
_FOLDERS = ("MODEL", "MODEL_ID", "FOLDER", "OUTPUT_DIR")
"""Metavariables of values that are files and folders. A model may be a folder."""


@dataclass(frozen=True, slots=True)
class CommandWords:
    """A command with its settings, or the program itself.

    Attributes:
        name: the word on the command line.
        path: the name after those of its parents, such as ``bench view``.
        commands: subcommands that its first argument may name instead.
    """

    name: str
    path: str
    help: str
    settings: tuple[Setting, ...]
    commands: tuple[CommandWords, ...] = ()

    @property
    def options(self) -> list[Setting]:
        """The settings that are flags."""
        return [setting for setting in self.settings if not setting.argument]

    @property
    def flags(self) -> list[str]:
        return [flag for setting in self.options for flag in setting.flags]

    @property
    def operands(self) -> list[Setting]:
        """The arguments, in their order."""
        return [setting for setting in self.settings if setting.argument]

    @property
    def words(self) -> list[str]:
        """What the first argument may be, besides files and folders."""
        choices = self.operands[0].kind.choices if self.operands else ()
        return [*(command.name for command in self.commands), *choices]

    @property
    def names(self) -> str:
        """``files`` or ``folders`` if arguments are such, else an empty string."""
        return next(filter(None, map(completed_as, self.operands)), "")


def completed_as(setting: Setting) -> str:
    """``files`` or ``folders`` if its values are such, else an empty string."""
    metavars = setting.kind.metavar.split("|")
    if any(metavar in _FOLDERS for metavar in metavars):
        return "folders"
    is_file = setting.kind.type is Path or any(metavar in _FILES for metavar in metavars)
    return "files" if is_file else ""


@takes(
    COMPLETION,
    ("tgi completion bash >> ~/.bash_completion", "bash"),
    ("tgi completion zsh > ~/.zfunc/_tgi", "zsh, in $fpath"),
    ("tgi completion fish > ~/.config/fish/completions/tgi.fish", "fish"),
    ("tgi completion powershell >> $PROFILE", "PowerShell"),
)
def completion(settings: ParsedSettings) -> None:
    """Print the script that completes commands in a shell.

    For bash, zsh and fish, save it where the shell looks for completions; for PowerShell, add it
    to the profile.
    """
    print(script(settings["shell"]), end="")


def script(shell: str) -> str:
    """The completion script of a shell."""
    commands = []
    for entry in COMMANDS:
        function, _ = entry.load()
        inner = getattr(function, "commands", {})
        within = tuple(_command(name, f"{entry.name} {name}", each) for name, each in inner.items())
        commands.append(_command(entry.name, entry.name, function, within))
    root = CommandWords("tgi", "", "", _ROOT_SETTINGS, tuple(commands))
    every = [each for command in commands for each in (command, *command.commands)]
    return (
        _templates()
        .get_template(SCRIPTS[shell])
        .render(header=_HEADER, root=root, commands=commands, every=every)
    )


def _command(
    name: str, path: str, function: Any, within: tuple[CommandWords, ...] = ()
) -> CommandWords:
    visible = tuple(setting for setting in function.settings if not setting.hidden)
    about = paragraphs(function.__doc__)[0].rstrip(".")
    return CommandWords(name, path, about, (*visible, _HELP, _HELP_ALL), within)


def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("completion_scripts")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.tests.update(switch=lambda setting: setting.kind.type is bool)
    templates.filters.update(
        completed_as=completed_as,
        sentence=_sentence,
        zsh_text=_zsh_text,
        zsh_flag=_zsh_flag,
        zsh_action=_zsh_action,
        fish_text=lambda text: text.replace("\\", "\\\\").replace("'", "\\'"),
        powershell_words=lambda words: ", ".join(f"'{word}'" for word in words),
    )
    return templates


def _sentence(setting: Setting) -> str:
    """The first sentence of its help, without the full stop."""
    return setting.help.split(". ")[0].rstrip(".")


def _zsh_text(text: str) -> str:
    for special in "\\[]:":
        text = text.replace(special, f"\\{special}")
    return text.replace("'", "'\\''")


def _zsh_action(setting: Setting) -> str:
    """What completes a value in zsh's ``_arguments``."""
    if setting.kind.choices:
        return f"({' '.join(setting.kind.choices)})"
    return {"files": "_files", "folders": "_files -/", "": ""}[completed_as(setting)]


def _zsh_flag(setting: Setting) -> str:
    """A flag as an argument of zsh's ``_arguments``."""
    value, equals = "", ""
    if setting.kind.type is not bool:
        value, equals = f":{setting.flag[2:]}:{_zsh_action(setting)}", "="
    text = f"[{_zsh_text(_sentence(setting))}]{value}"
    names = [flag + equals * flag.startswith("--") for flag in setting.flags]
    if len(names) == 1:
        return f"'{names[0]}{text}'"
    return f"'({' '.join(setting.flags)})'{{{','.join(names)}}}'{text}'"


def main(arguments: list[str]) -> None:
    """Write all scripts into a folder."""
    if len(arguments) != 1:
        sys.exit("usage: python -m tgi_cli.cli.completions FOLDER")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for shell, name in SCRIPTS.items():
        (folder / name).write_text(script(shell), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
