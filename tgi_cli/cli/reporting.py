"""How commands end: errors in one line each, with a remedy, and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from tgi_cli.errors import ExitCode, TgiError

TRACEBACK_VARIABLE = "TGI_TRACEBACK"


def run_reporting(command: Callable[[], object], arguments: Sequence[str]) -> int:
    """Run a command, report the error that it raises, and return its exit code.

    Args:
        command: Returns its exit code, or anything else for success.
        arguments: The command line.
    """
    try:
        status = command()
    except TgiError as error:
        report(error.cause, error.remedy, arguments)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has exited: discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILURE
    except Exception as error:  # a bug: one line too
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        remedy = "this is a bug in tgi; `tgi --traceback ...` prints the traceback"
        report(cause, remedy, arguments)
        return ExitCode.FAILURE
    return status if isinstance(status, int) else ExitCode.OK


def report(cause: str, remedy: str, arguments: Sequence[str]) -> None:
    """Print an error as text or as a JSON log line, after its traceback if requested.

    Names and values of files, which it may quote, cannot add lines or address the terminal.
    """
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        traceback.print_exc()
    if "--json-output" in arguments or os.environ.get("JSON_OUTPUT", "").lower() in ("1", "true"):
        from tgi_cli.logging import json_line

        print(json_line("ERROR", cause, remedy=remedy), file=sys.stderr, flush=True)
        return
    label = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        label = f"\x1b[31m{label}\x1b[0m"
    cause, remedy = _escaped(cause), _escaped(remedy)
    print(f"{label} {cause}", *([f"       {remedy}"] if remedy else []), sep="\n", file=sys.stderr)


def _escaped(text: str) -> str:
    """A text with escapes for characters that do not print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
