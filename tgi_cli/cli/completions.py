"""``tgi completion SHELL``, and the scripts of completions/: ``python -m tgi_cli.cli.completions``.

The scripts contain all commands and flags, so that completion starts no Python process, unlike
with the scripts of Typer and click. Their templates are in completion_scripts/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

from tgi_cli.cli.commands import COMMANDS
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import COMPLETION, Setting
from tgi_cli.config.settings.values import SWITCH

SCRIPTS = {"bash": "tgi.bash", "zsh": "_tgi", "fish": "tgi.fish", "powershell": "tgi.ps1"}
"""By shell (bash 3.2, PowerShell 5.1 and later): the file name under which it looks for the script,
which is also that of the template."""

_HEADER = "# Completes tgi's commands and flags. Written by `make completions`."
_HELP = Setting(SWITCH, "Show help", name="help", short="h")
_ROOT_SETTINGS = (
    Setting(SWITCH, "Print the version", name="version", short="V"),
    Setting(SWITCH, "Print the traceback of an error", name="traceback"),
    _HELP,
)


@dataclass(frozen=True, slots=True)
class CommandWords:
    """A command with its settings, or the program itself."""

    name: str
    help: str
    settings: tuple[Setting, ...]

    @property
    def options(self) -> list[Setting]:
        """The settings that are flags."""
        return [setting for setting in self.settings if not setting.argument]

    @property
    def flags(self) -> list[str]:
        return [flag for setting in self.options for flag in setting.flags]

    @property
    def operand(self) -> tuple[str, ...] | None:
        """The choices of the first argument, empty for a folder, or None without arguments."""
        return next((s.kind.choices for s in self.settings if s.argument), None)


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
        settings: tuple[Setting, ...] = function.settings  # type: ignore[attr-defined]
        visible = tuple(setting for setting in settings if not setting.hidden)
        commands.append(CommandWords(entry.name, entry.help.rstrip("."), (*visible, _HELP)))
    root = CommandWords("tgi", "", _ROOT_SETTINGS)
    return (
        _templates()
        .get_template(SCRIPTS[shell])
        .render(header=_HEADER, root=root, commands=commands)
    )


def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("completion_scripts")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.tests.update(
        switch=lambda setting: setting.kind.type is bool,
        path=lambda setting: setting.kind.type is Path,
    )
    templates.filters.update(
        sentence=_sentence,
        zsh_text=_zsh_text,
        zsh_flag=_zsh_flag,
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


def _zsh_flag(setting: Setting) -> str:
    """A flag as an argument of zsh's ``_arguments``."""
    kind, value, equals = setting.kind, "", ""
    if kind.type is not bool:
        action = f"({' '.join(kind.choices)})" if kind.choices else "_files" * (kind.type is Path)
        value, equals = f":{setting.flag[2:]}:{action}", "="
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
