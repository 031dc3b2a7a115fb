"""Errors that describe how the processes of a model have ended."""

from __future__ import annotations

import signal

from tgi_cli.errors import ShardError

SEE_LOG = "see its log above"

_WHY: dict[int, str] = {
    signal.SIGKILL: "unless a user did that, the system was out of memory: see its log, and try "
    "a smaller model or cache (--max-batch-total-tokens)",
}


def status_error(name: str, status: int, see: str = SEE_LOG) -> ShardError:
    """The error of a process that has ended with the status of its Popen."""
    if status >= 0:
        return ShardError(f"{name} ended with status {status}", see)
    try:
        number = signal.Signals(-status).name
    except ValueError:
        number = f"signal {-status}"
    return ShardError(f"{name} was killed by {number}", _WHY.get(-status, see))
