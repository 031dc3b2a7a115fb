"""Runs a call's sections in a process of its own, and those that are left in another if it ends.

A kernel that hangs, a crash, or an error that leaves the device unusable costs one section.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.benchmarks.gpu.sections import GRACE, report, saved_sections

Command = Callable[[Sequence[str], float, bool], Sequence[str]]
"""Of the sections to run, minutes, and whether to go on with saved results: a command line."""


def supervise(
    call: str, sections: Sequence[str], out: Path, minutes: float, command: Command
) -> int:
    """Run the sections, which save what they find in ``out``; returns 1 if any failed, else 0."""
    deadline = time.monotonic() + 60 * minutes
    (out / f"{call}.json").unlink(missing_ok=True)
    left, resumed = list(sections), False
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            print(f"\nno time left for: {', '.join(left)}", flush=True)
            break
        _run(command(left, seconds / 60, resumed), seconds + 2 * GRACE)
        done = saved_sections(out, call)
        remaining = [name for name in left if name not in done]
        if remaining == left:
            print(f"\nnot begun, see above: {', '.join(left)}", flush=True)
            return 1
        left, resumed = remaining, True
    return max(report(out, call), int(bool(left)))


def _run(command: Sequence[str], seconds: float) -> None:
    """Run a program, and end all that it leaves behind."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
