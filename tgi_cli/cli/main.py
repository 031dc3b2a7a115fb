"""``tgi``: the commands, and what a failing one leaves behind: its cause, a remedy, a code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Annotated, Any, cast

import typer

import tgi_cli
from tgi_cli.cli.completions import completion
from tgi_cli.cli.download_weights import download_weights
from tgi_cli.cli.model_server import model_server
from tgi_cli.cli.options import ENVIRONMENT, from_environment
from tgi_cli.cli.router import router
from tgi_cli.cli.serve import serve
from tgi_cli.cli.warmup import warmup
from tgi_cli.errors import ExitCode, TgiError

TRACEBACK_VARIABLE = "TGI_TRACEBACK"
_PARTS = "Parts"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=ENVIRONMENT)(serve)
app.command()(download_weights)
app.command()(warmup)
app.command(rich_help_panel=_PARTS, epilog=ENVIRONMENT)(model_server)
app.command(rich_help_panel=_PARTS, epilog=ENVIRONMENT)(router)
app.command(rich_help_panel=_PARTS)(completion)


@app.callback(invoke_without_command=True)
def tgi(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True)
    ] = False,
    show_traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", help="Show where an error came from.", envvar=TRACEBACK_VARIABLE
        ),
    ] = False,
) -> None:
    """Serve language models on your own machine."""
    if show_traceback:
        os.environ[TRACEBACK_VARIABLE] = "1"  # the children's too
    if version:
        print(f"tgi {tgi_cli.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# Typer brings click along under changing names; its errors are found through one that it exports.
_ClickError = cast(type[Exception], typer.BadParameter.__mro__[2])


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    command = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name="tgi", standalone_mode=False)
    except TgiError as error:
        _report(error.cause, error.remedy, arguments)
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Who read our output has gone; nothing that is left to be written can be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILURE
    except _ClickError as error:
        _report(*_usage(error), arguments)
        return ExitCode.USAGE
    except Exception as error:  # a defect of ours: one line too, and how to see more
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        _report(cause, "this is a defect of tgi; `tgi --traceback ...` shows where", arguments)
        return ExitCode.FAILURE
    return status if isinstance(status, int) else ExitCode.OK


def main() -> None:
    """The entry point of the ``tgi`` command."""
    sys.exit(run(sys.argv[1:]))


def _usage(error: Any) -> tuple[str, str]:
    """Cause and remedy of a command line that cannot be, one line each."""
    text = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    remedy = f"see {context.command_path if context else 'tgi'} --help"
    parameter = getattr(error, "param", None)
    if context and parameter and from_environment(context, parameter.name):
        remedy = f"it comes from the environment variable {parameter.envvar}; {remedy}"
    return text, remedy


def _report(cause: str, remedy: str, arguments: list[str]) -> None:
    """Print an error, as text or as the log's JSON; with where it came from if that is asked."""
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        traceback.print_exc()
    if "--json-output" in arguments or os.environ.get("JSON_OUTPUT", "").lower() in ("1", "true"):
        line = {"level": "ERROR", "fields": {"message": cause, "remedy": remedy}, "target": "tgi"}
        print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)
        return
    label = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        label = f"\x1b[31m{label}\x1b[0m"
    print(f"{label} {cause}", *([f"       {remedy}"] if remedy else []), sep="\n", file=sys.stderr)
