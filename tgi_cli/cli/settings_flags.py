"""Makes commands of functions, with flags, variables and help from the table of settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tgi_cli.cli.commands import PlainCommand
from tgi_cli.cli.help import CommandHelp, Example, ProgramHelp
from tgi_cli.cli.parsed_settings import FILE, NEGATION, ParsedSettings
from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.setting import Setting

_LISTS = ("--served-model-name",)
"""Flags that take several words, as in vLLM."""

_HELP_ALL = "help_all"

Runner = Callable[[ParsedSettings], None]


def takes(
    command: str, *examples: Example, several: bool = False
) -> Callable[[Runner], Callable[..., None]]:
    """A decorator: make a command of a function that takes the settings of ``command``.

    Args:
        examples: Command lines with their meanings, for the help.
        several: Whether its argument may be repeated: ``further_arguments`` of its settings.
    """

    def declare(run: Runner) -> Callable[..., None]:
        def called(context: typer.Context, **values: Any) -> None:
            values.pop(_HELP_ALL)
            run(ParsedSettings.read(command, context, values))

        parameters = [_parameter("context", typer.Context)]
        for setting in settings_of(command):
            default = () if setting.required else (setting.default,)
            parameters.append(_parameter(setting.name, _annotation(setting, command), *default))
            if setting.negative and setting.default is False:
                # A hidden option of its own: two long flags do not fit on a line.
                option = typer.Option(setting.negative_flag, hidden=True)
                parameters.append(
                    _parameter(NEGATION + setting.name, Annotated[bool, option], False)
                )
        parameters.append(_parameter(_HELP_ALL, Annotated[bool, _help_all_option()], False))
        update_wrapper(called, run)
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.settings = settings_of(command)  # type: ignore[attr-defined]
        called.examples = examples  # type: ignore[attr-defined]
        called.command_class = SettingsCommand  # type: ignore[attr-defined]
        called.several = several  # type: ignore[attr-defined]
        return called

    return declare


class SettingsCommand(PlainCommand):
    """A command whose values are parsed by the table of settings alone.

    Typer would parse them again with pydantic, to the same result, at a cost in memory and time in
    each process of a server; see :mod:`tgi_cli.cli.commands`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_extra_args = getattr(self.callback, "several", False)
        settings = {setting.name: setting for setting in getattr(self.callback, "settings", ())}
        for param in self.params:
            setting = settings.get((param.name or "").removeprefix(NEGATION))
            if setting is not None:
                read = partial(_read, param, setting, param.process_value)
                param.process_value = read  # type: ignore[method-assign]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page of ``--help``."""
        formatter.write(self.help_page(ctx).text())

    def help_page(self, context: Any) -> CommandHelp:
        """The command's help, in the name of the program that was started."""
        program = context.obj if isinstance(context.obj, ProgramHelp) else None
        return CommandHelp(
            path=program.name if program else context.command_path,
            about=program.about if program else (self.callback.__doc__ or ""),
            settings=getattr(self.callback, "settings", ()),
            several=self.allow_extra_args and not program,
            examples=() if program else getattr(self.callback, "examples", ()),
            defaults=context.default_map or {},
            notes=self.epilog or "",
        )

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Parse the command line, on which flags of ``NAME...`` may have several words."""
        rest: list[str] = super().parse_args(context, repeat_flags(args))
        return rest


def _help_all_option() -> Any:
    def show(context: typer.Context, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            print(context.command.help_page(context).text(everything=True))  # type: ignore[attr-defined]
            raise typer.Exit

    return typer.Option("--help-all", hidden=True, is_eager=True, callback=show)


def repeat_flags(args: list[str]) -> list[str]:
    """The command line with a flag for each name of ``--served-model-name A B``, as click expects.

    The words up to the next flag are names. The last of several is MODEL if none is given before.
    """
    found: list[str] = []
    flag = ""
    model = bool(args) and not args[0].startswith("-")
    for index, word in enumerate(args):
        if word.startswith("-"):
            flag = word if word in _LISTS else ""
            model = model or word.partition("=")[0] in ("--model", "--model-id")
            found.append(word)
            continue
        if flag and args[index - 1] != flag:
            ends = index + 1 == len(args) or args[index + 1].startswith("-")
            if not ends or model:
                found.append(flag)
        found.append(word)
    return found


def _read(
    param: Any,
    setting: Setting,
    by_typer: Callable[[typer.Context, Any], Any],
    context: typer.Context,
    value: Any,
) -> Any:
    """A parameter's value: words are parsed, values such as defaults are returned as they are."""
    try:
        if isinstance(value, str):
            value = setting.kind.read(value)
        elif isinstance(value, list | tuple) and setting.kind.type is list:
            value = [part for word in value for part in setting.kind.read(word)] or None
        elif value is None and setting.required:
            return by_typer(context, value)  # which reports that it is missing
        elif not isinstance(value, int | float | Path | list | tuple | None):
            return by_typer(context, value)  # the sentinel for "no value" varies by version
    except ValueError as error:
        raise typer.BadParameter(str(error), ctx=context, param=param) from None
    return value if param.callback is None else param.callback(context, param, value)


def _parameter(name: str, annotation: Any, *default: Any) -> inspect.Parameter:
    value = default[0] if default else inspect.Parameter.empty
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=value)


def _annotation(setting: Setting, command: str) -> Any:
    """The setting as a declaration for Typer."""
    kind = setting.kind
    # SettingsCommand parses the words; Typer only distinguishes switches and repeated flags.
    base: Any = {bool: bool, list: list[str], Path: Path}.get(kind.type, str)
    if kind.choices:
        base = Literal[kind.choices]
    common: dict[str, Any] = {
        "metavar": kind.metavar or None,
        "help": setting.help,
        "envvar": list(setting.all_variables) or None,
        "show_envvar": False,
        "hidden": setting.hidden,
        "rich_help_panel": setting.panel,
    }
    if setting.argument:
        common |= {"show_default": False, "rich_help_panel": None}
        return Annotated[base, typer.Argument(**common)]
    if setting.name == "config":
        common |= {"is_eager": True, "callback": _file_reader(command)}
    names = [setting.flag]
    if setting.negative and setting.default is not False:
        names = [f"{setting.flag}/{setting.negative_flag}"]
    if setting.short:
        names.append(f"-{setting.short}")
    shown = setting.default not in ((), "")
    return Annotated[base, typer.Option(*names, show_default=shown, **common)]


def _file_reader(command: str) -> Callable[[typer.Context, Path | None], Path | None]:
    """A callback that makes the file's values the defaults of all flags parsed after --config."""

    def read(context: typer.Context, value: Path | None) -> Path | None:
        if value is not None and not context.resilient_parsing:
            from tgi_cli.config.settings.file import read_file

            found = read_file(value, command)
            context.default_map = {**(context.default_map or {}), **found}
            context.meta[FILE] = (str(value), tuple(found))
        return value

    return read
