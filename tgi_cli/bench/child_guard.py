"""Runs a command that must not outlive whoever asked for it.

``python -m tgi_cli.bench.child_guard COMMAND``: the command gets SIGTERM when stdin ends: it is a
pipe that only the asking process can write to, and that the system closes when that process is
gone, however it went. SIGTERM and SIGINT are handed on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

_GRACE_SECONDS = 30.0


def main(command: list[str]) -> int:
    """The command's exit status."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for got in early:
        process.send_signal(got)
    threading.Thread(target=_watch, args=(process,), daemon=True).start()
    status = process.wait()
    return status if status >= 0 else 128 - status


def _watch(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1 << 10):
        pass
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
