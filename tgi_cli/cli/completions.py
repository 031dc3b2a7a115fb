"""``tgi completion SHELL``, and the scripts of completions/: ``python -m tgi_cli.cli.completions``.

The scripts hold all commands and flags, so that completing starts no Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from tgi_cli.cli import shells
from tgi_cli.cli.shells import Command, Flag

FILES = {
    "bash": "tgi.bash",
    "zsh": "_tgi",
    "fish": "tgi.fish",
    "powershell": "tgi.ps1",
}
"""The names under which each shell looks for such a script."""


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish", "powershell"], typer.Argument(help="Whose script.")
    ],
) -> None:
    """Print the script that makes a shell complete tgi's commands and flags.

    For bash, zsh and fish it goes where the shell looks for completions, for PowerShell into
    the profile.
    """
    print(script(shell), end="")


def script(shell: str) -> str:
    """The completion script for ``shell``, one of FILES."""
    from tgi_cli.cli.commands import COMMANDS
    from tgi_cli.cli.main import application

    app = application(*(entry.name for entry in COMMANDS))
    commands = tuple(
        _described(info.name or callback.__name__.replace("_", "-"), callback)
        for info in app.registered_commands
        if (callback := info.callback) is not None
    )
    callback = app.registered_callback.callback if app.registered_callback else None
    assert callback is not None
    root = replace(_described("tgi", callback), operand=None, commands=commands)
    write = {
        "bash": shells.bash,
        "zsh": shells.zsh,
        "fish": shells.fish,
        "powershell": shells.powershell,
    }
    return write[shell](root)


def _described(name: str, function: Callable[..., object]) -> Command:
    """A command's function as plain data, from its annotations."""
    flags: list[Flag] = []
    operands: list[tuple[str, ...]] = []
    for parameter, hint in get_type_hints(function, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            kinds = [kind for kind in _kinds(hint.__origin__) if kind is not type(None)]
            choices = tuple(str(c) for k in kinds if get_origin(k) is Literal for c in get_args(k))
            if isinstance(info, ArgumentInfo):
                operands.append(choices)
            elif isinstance(info, OptionInfo) and not info.hidden:
                flags.append(
                    Flag(
                        names=_spellings(parameter, info, is_switch=bool in kinds),
                        help=_sentence(info.help),
                        takes_value=bool not in kinds,
                        choices=choices,
                        is_path=Path in kinds,
                    )
                )
    flags.append(Flag(names=("-h", "--help"), help="Show help"))
    return Command(
        name=name,
        help=_sentence(function.__doc__),
        flags=tuple(flags),
        operand=operands[0] if operands else None,
    )


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a type that is none is its own."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _spellings(parameter: str, info: OptionInfo, is_switch: bool) -> tuple[str, ...]:
    """All names of an option, as Typer makes them."""
    # Inside Annotated, the first name lies where the default would.
    declared = tuple(n for n in (info.default, *(info.param_decls or ())) if isinstance(n, str))
    if not declared:
        name = parameter.replace("_", "-")
        declared = (f"--{name}/--no-{name}",) if is_switch else (f"--{name}",)
    return tuple(name for names in declared for name in names.split("/"))


def _sentence(text: str | None) -> str:
    """The first sentence of a help text, on one line and without its full stop."""
    first = " ".join((text or "").split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".")


def main(arguments: list[str]) -> None:
    """Write all scripts into the folder that the one argument names."""
    if len(arguments) != 1:
        sys.exit("usage: python -m tgi_cli.cli.completions FOLDER")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for shell, name in FILES.items():
        (folder / name).write_text(script(shell), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
