"""Work on tensors, in a process of its own: this one never imports torch nor opens a pickle.

The child writes one JSON object a line to stdout: ``{"log": ...}``, or at its end, if it failed,
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
    """``python -m MODULE ARGUMENTS``; raises the error that the child reports."""
    command, environment = module_command(module, *arguments), child_environment()
    with tempfile.TemporaryFile("w+", errors="replace") as noise:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment
        )
        told: errors.TgiError | None = None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                told = _hear(line) or told
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if told is not None:
            raise told
        if status == -9:
            raise errors.OutOfMemoryError(
                f"{module} was killed, most likely for want of memory",
                "do this on a machine with more memory",
            )
        if status:
            noise.seek(0)
            last = ([line.strip() for line in noise if line.strip()] or [f"status {status}"])[-1]
            raise errors.ModelError(f"{module} failed: {last}")


def _hear(line: str) -> errors.TgiError | None:
    """Log what the child says; return the error if it is one."""
    try:
        said = json.loads(line)
    except ValueError:
        logger.debug("%s", line.rstrip())
        return None
    if "error" in said:
        kind = getattr(errors, said["error"], errors.ModelError)
        error: errors.TgiError = kind(said["cause"], said["remedy"])
        return error
    logger.info("%s", said["log"])
    return None


def log_to_parent(text: str) -> None:
    """In the child: a line for the parent's log."""
    print(json.dumps({"log": text}), flush=True)


def main(work: Callable[[], None]) -> int:
    """In the child: do ``work``, report how it failed, return the exit status."""
    try:
        work()
    except KeyboardInterrupt:
        return int(errors.ExitCode.INTERRUPTED)
    except errors.TgiError as error:
        return _report(error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _report(disk_full(error.filename))
        return _report(errors.ModelError(f"{error.filename}: {error.strerror or error}"))
    return 0


def disk_full(where: str | Path | None) -> errors.DiskFullError:
    """The error for a disk that filled up while weights were written."""
    return errors.DiskFullError(
        f"the disk filled up while writing {where or 'weights'}",
        "free some space, or set HF_HUB_CACHE to a larger disk",
    )


def _report(error: errors.TgiError) -> int:
    said = {"error": type(error).__name__, "cause": error.cause, "remedy": error.remedy}
    print(json.dumps(said), flush=True)
    return int(error.exit_code)
