"""The entry point of ``tgi``: runs a command and reports its errors, with a remedy and a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer

from tgi_cli.cli.commands import COMMANDS, PlainGroup
from tgi_cli.cli.help import ProgramHelp
from tgi_cli.cli.other_servers import command_hint, flag_hint
from tgi_cli.cli.reporting import TRACEBACK_VARIABLE, report, run_reporting
from tgi_cli.errors import ExitCode
from tgi_cli.version import __version__

_ENVIRONMENT = "Every flag has an environment variable, MAX_INPUT_TOKENS for --max-input-tokens \
and so on. Flags override variables, variables override the file of --config."
_OWN_FLAGS = ("-h", "--help", "-V", "--version", "--traceback")
_WITHOUT_VARIABLES = ("chat", "quantize", "bench", "connect", "completion")


def application(*names: str) -> typer.Typer:
    """All commands: those in ``names`` with their flags, the others as entries of the list."""
    app = typer.Typer(
        cls=PlainGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich takes longer to import than all else
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(tgi)
    for entry in COMMANDS:
        function, cls = entry.load() if entry.name in names else (_listed, None)
        app.command(
            entry.name,
            cls=cls,
            short_help=entry.help,
            epilog=None if entry.name in _WITHOUT_VARIABLES else _ENVIRONMENT,
        )(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tgi {__version__}")
        raise typer.Exit


def tgi(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    show_traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", help="Print the traceback of an error.", envvar=TRACEBACK_VARIABLE
        ),
    ] = False,
) -> None:
    """Serve language models on your own machine."""
    if show_traceback:
        os.environ[TRACEBACK_VARIABLE] = "1"  # the children's too
    if context.invoked_subcommand is None:
        print(context.get_help())


def _listed() -> None:
    """Stands in for a command that is not imported."""


# Typer vendors click under varying names, but exports one of its exceptions.
_ClickError = cast(type[Exception], typer.BadParameter.__mro__[2])


def run(
    arguments: list[str],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    program: ProgramHelp | None = None,
) -> int:
    """Run one command line and return its exit code.

    Args:
        defaults: Unparsed settings by command, overridden by all others.
        program: The program whose name help and messages use. Default: ``tgi``.
    """
    words = _switches(arguments) or ["--help"]
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    elif _begins_with_setting(words[0]):
        words = ["serve", *words]
    wanted = next((word for word in words if not word.startswith("-")), None)
    names = [] if wanted is None else [wanted]
    command = typer.main.get_command(application(*names))

    def invoke() -> object:
        try:
            return command.main(
                args=words,
                prog_name="tgi",
                standalone_mode=False,
                default_map=defaults,
                obj=program,
            )
        except typer.Abort:
            return ExitCode.INTERRUPTED
        except _ClickError as error:
            known = any(entry.name == wanted for entry in COMMANDS)
            path = f"tgi {wanted}" if known else "tgi"
            cause, remedy = _usage(error, program.name if program else path)
            if wanted and not known:
                remedy = command_hint(wanted) or remedy
            report(cause, remedy, words)
            return ExitCode.USAGE

    return run_reporting(invoke, words)


def main() -> None:
    """The ``tgi`` program."""
    sys.exit(run(sys.argv[1:]))


def _switches(arguments: list[str]) -> list[str]:
    """Rewrite switches that have a value, as TGI's ``--sharded true`` and ``--sharded=false``."""
    if not any(word.lower().endswith(("true", "false")) for word in arguments):
        return arguments
    from tgi_cli.config.settings import SETTINGS

    off = {s.flag: s.negative_flag for s in SETTINGS if s.kind.type is bool}
    words: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        if not equals and words:
            flag, value = words[-1], word
        if flag not in off or value.lower() not in ("true", "false"):
            words.append(word)
            continue
        if not equals:
            words.pop()
        # A switch that nothing switches off keeps its value, which click refuses.
        on = value.lower() == "true"
        words.append(flag if on else off[flag] or f"{flag}=false")
    return words


def _begins_with_setting(word: str) -> bool:
    """Whether a command line begins with a flag of ``tgi serve``, as the arguments of TGI's image
    do: ``--model-id MODEL``."""
    if not word.startswith("-") or word in _OWN_FLAGS:
        return False
    from tgi_cli.config.settings import settings_of

    flag = word.partition("=")[0]
    return any(flag in setting.flags for setting in settings_of("serve") if not setting.argument)


def _usage(error: Any, program: str) -> tuple[str, str]:
    """Cause and remedy of a usage error in the command line of ``program``, one line each."""
    text = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else ""
    remedy = f"see {program if not context or context.obj else path} --help"
    if path == "tgi chat" and text.startswith("Got unexpected extra argument"):
        remedy = "give the prompt with -p"  # ollama run MODEL PROMPT
    unknown = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
    if context and unknown:  # with what it is called here, instead of similar spellings
        known = {name for option in context.command.params for name in option.opts}
        if hint := flag_hint(unknown, known):
            return error.message, hint
    parameter = getattr(error, "param", None)
    if context and parameter:
        source = context.get_parameter_source(parameter.name)
        variables = parameter.envvar or ()
        names = [variables] if isinstance(variables, str) else variables
        if source is not None and source.name == "ENVIRONMENT":
            name = next(name for name in names if os.environ.get(name))
            remedy = f"it comes from the environment variable {name}; {remedy}"
    return text, remedy
