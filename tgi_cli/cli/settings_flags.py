"""Makes commands of functions: their flags, variables and help come from the table of settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from tgi_cli.cli.groups import PlainCommand
from tgi_cli.cli.parsed_settings import FILE, REFUSAL, ParsedSettings
from tgi_cli.cli.parsers import parser
from tgi_cli.config.settings import SETTINGS, Setting, settings_of

Runner = Callable[[ParsedSettings], None]


def takes(command: str) -> Callable[[Runner], Callable[..., None]]:
    """A decorator: the function is called with the settings of ``command``, as Given."""

    def declare(run: Runner) -> Callable[..., None]:
        def called(context: typer.Context, **values: Any) -> None:
            run(ParsedSettings.read(command, context, values))

        parameters = [_parameter("context", typer.Context)]
        for setting in settings_of(command):
            kind, default = _annotation(setting, command), setting.default
            parameters.append(_parameter(setting.name, kind, default))
            if setting.negative and default is False:
                # Apart and hidden: it is what is so anyway, and two long flags do not fit a line.
                option = typer.Option(f"--no-{setting.flag[2:]}", hidden=True)
                parameters.append(
                    _parameter(REFUSAL + setting.name, Annotated[bool, option], False)
                )
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(called, attribute, getattr(run, attribute))
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return called

    return declare


class SettingsCommand(PlainCommand):
    """A command whose words are read by the table's kinds alone.

    Typer would have pydantic read them again, which finds nothing else, but takes memory and time
    in each process of a server; see :mod:`tgi_cli.cli.groups`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = {setting.name: setting for setting in SETTINGS}
        for param in self.params:
            setting = settings.get(param.name.removeprefix(REFUSAL) if param.name else "")
            if setting is not None:
                read = partial(_read, param, setting, param.process_value)
                param.process_value = read  # type: ignore[method-assign]


def _read(
    param: Any,
    setting: Setting,
    by_typer: Callable[[typer.Context, Any], Any],
    context: typer.Context,
    value: Any,
) -> Any:
    """A parameter's value: a word is read, what is a value already stays as it is."""
    if isinstance(value, str):
        try:
            value = setting.kind.read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=context, param=param) from None
    elif not isinstance(value, int | float | Path | list | tuple | None):
        return by_typer(context, value)  # what stands for no value differs between versions
    return value if param.callback is None else param.callback(context, param, value)


def _parameter(name: str, annotation: Any, *default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    if not default:
        return inspect.Parameter(name, kind, annotation=annotation)
    return inspect.Parameter(name, kind, annotation=annotation, default=default[0])


def _annotation(setting: Setting, command: str) -> Any:
    """The setting as Typer wants it declared."""
    kind = setting.kind
    base: Any = kind.type
    if kind.choices:
        base = Literal[kind.choices]
    elif kind.type is list:
        base = list[str]
    elif kind.type is tuple:
        base = Any
    if setting.default is None and base is not Any:
        base = Optional[base]  # noqa: UP045 (made while the program runs)
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
    if kind.parse is not None:
        common["parser"] = parser(kind.parse)
    if setting.name == "config":
        common |= {"is_eager": True, "callback": _reader(command)}
    has_two = setting.negative and setting.default is not False
    negative = f"/--no-{setting.flag[2:]}" if has_two else ""
    names = [setting.flag + negative, *([f"-{setting.short}"] if setting.short else [])]
    return Annotated[base, typer.Option(*names, show_default=setting.default != (), **common)]


def _reader(command: str) -> Callable[[typer.Context, Path | None], Path | None]:
    """What makes the file's values the defaults of all flags that are read after --config."""

    def read(context: typer.Context, value: Path | None) -> Path | None:
        if value is not None and not context.resilient_parsing:
            from tgi_cli.config.settings.file import read_file

            found = read_file(value, command)
            context.default_map = {**(context.default_map or {}), **found}
            context.meta[FILE] = (str(value), tuple(found))
        return value

    return read
