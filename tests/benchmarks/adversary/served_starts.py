"""Start ``tgi serve`` with a folder and flags, and compare it with a normal start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.adversary.monitor import memory_of
from tests.tools.process_tree import descendants_of

_RUNS = 3
_BYTES = 4 << 30
_PROCESSES = 12


@dataclass(frozen=True)
class Start:
    """What was measured of a start.

    Attributes:
        code: exit code, 0 if it became ready, -1 on timeout or if it used too much memory or too
            many processes.
        seconds: until it was ready or had ended.
        peak: bytes, the sum over its processes.
        more: seconds beyond a normal start.
        runs: how often it was started.
    """

    code: int
    seconds: float
    peak: int
    more: float = 0.0
    runs: int = 1


class ServedStarts:
    """Starts of a server, each compared with that of a folder without flags.

    Args:
        base: the folder of the normal start.
        log: where the output of the last start is written.
        seconds: how much longer than a normal start one may take before it is repeated, up to
            three times.
        serve: starts a server; replaced in tests.
    """

    def __init__(
        self,
        base: Path,
        log: Path,
        seconds: float,
        serve: Callable[[Path, Sequence[str], Path, float], Start] | None = None,
    ) -> None:
        self._base = base
        self.log = log
        self._seconds = seconds
        self.serve = serve or _serve
        self.normal = self.serve(base, (), log, seconds * 4)
        if self.normal.code:
            raise SystemExit(f"the miniature cannot be served:\n{log.read_text()}")

    def start(self, folder: Path, flags: Sequence[str] = ()) -> Start:
        """Start a server; beside other programs, the start that is least behind counts.

        A start that is late is compared with a normal one right after it, since other programs
        delay both.
        """
        found: list[Start] = []
        while len(found) < _RUNS:
            one = self.serve(folder, flags, self.log, self._seconds * 4)
            more = one.seconds - self.normal.seconds
            if one.code != -1 and more > self._seconds:
                beside = self.log.with_name(f"{self.log.name}-normal")
                now = self.serve(self._base, (), beside, self._seconds * 4)
                more = min(more, one.seconds - now.seconds)
            found.append(Start(one.code, one.seconds, one.peak, more))
            if one.code != -1 and more <= self._seconds:
                break
        last = found[-1]
        least = min(found, key=lambda each: each.more)
        peak = max(each.peak for each in found)
        return Start(last.code, least.seconds, peak, least.more, len(found))


def _serve(folder: Path, flags: Sequence[str], log: Path, limit: float) -> Start:
    """Run ``tgi serve`` until it is ready, exits or ``limit`` seconds have passed."""
    command = [sys.executable, "-m", "tgi_cli", "serve", str(folder), "--hostname", "127.0.0.1"]
    command += ["--port", "0"] if "--port" not in flags else []
    began = time.monotonic()
    peak = 0
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--no-measured-limits", *flags],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    code: int | None = None
    try:
        while code is None and time.monotonic() - began < limit:
            code = process.poll()
            family = [process.pid]
            with contextlib.suppress(OSError):
                family += descendants_of(process.pid)
            peak = max(peak, sum(memory_of(pid, "VmRSS") for pid in family))
            if peak > _BYTES or len(family) > _PROCESSES:
                break
            if code is None and b"http://127.0.0.1" in log.read_bytes():
                code = 0
            time.sleep(0.02)
        seconds = time.monotonic() - began
    finally:
        with contextlib.suppress(OSError):
            family = [process.pid, *descendants_of(process.pid)]
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return Start(-1 if code is None else code, seconds, peak)
