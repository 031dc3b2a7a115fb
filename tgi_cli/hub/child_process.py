"""Runs work on tensors in a child process, so that this one never imports torch or opens a pickle.

The child writes one JSON object per line to stdout: ``{"log": ...}``, or at its end, if it failed,
``{"error": class, "cause": ..., "remedy": ...}``.
"""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tgi_cli import errors
from tgi_cli.process.spawn import child_environment, module_command

logger = logging.getLogger(__name__)


def run(module: str, *arguments: str | Path) -> None:
    """Run ``python -m MODULE ARGUMENTS``; raise the error that the child reports."""
    command, environment = module_command(module, *arguments), child_environment()
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
        failure: errors.TgiError | None = None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                failure = handle_line(line) or failure
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if failure is not None:
            raise failure
        if status == -9:
            raise errors.OutOfMemoryError(
                f"{module} was killed, most likely for lack of memory",
                "do this on a machine with more memory",
            )
        if status:
            stderr.seek(0)
            last = ([line.strip() for line in stderr if line.strip()] or [f"status {status}"])[-1]
            raise errors.ModelError(f"{module} failed: {last}")


def handle_line(line: str) -> errors.TgiError | None:
    """Log a line of the child, or return the error that it describes."""
    try:
        message = json.loads(line)
    except ValueError:
        logger.debug("%s", line.rstrip())
        return None
    if "error" in message:
        error_type = getattr(errors, message["error"], errors.ModelError)
        error: errors.TgiError = error_type(message["cause"], message["remedy"])
        return error
    logger.info("%s", message["log"])
    return None


def log_to_parent(text: str) -> None:
    """In the child: add a line to the parent's log."""
    print(json.dumps({"log": text}), flush=True)


def main(work: Callable[[], None]) -> int:
    """In the child: run ``work``, report its failure, return the exit status."""
    try:
        work()
    except KeyboardInterrupt:
        return int(errors.ExitCode.INTERRUPTED)
    except errors.TgiError as error:
        return _report(error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _report(disk_full_error(error.filename))
        return _report(errors.ModelError(f"{error.filename}: {error.strerror or error}"))
    return 0


def disk_full_error(path: str | Path | None) -> errors.DiskFullError:
    """Build the error for a disk that filled up while weights were written."""
    return errors.DiskFullError(
        f"the disk filled up while writing {path or 'weights'}",
        "free some space, or set HF_HUB_CACHE to a larger disk",
    )


def _report(error: errors.TgiError) -> int:
    report = {"error": type(error).__name__, "cause": error.cause, "remedy": error.remedy}
    print(json.dumps(report), flush=True)
    return int(error.exit_code)
