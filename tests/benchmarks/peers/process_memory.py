"""Measures the physical memory of a process and its descendants, and its peak.

Processes share pages: those of an interpreter, its libraries, a mapped checkpoint. A sum of
resident sizes (RSS) counts such a page once for each of them, which puts servers of several
processes at a disadvantage. A sum of proportional sizes (Pss) counts it once: each of n processes
is charged an nth.

Other programs take their part, too. Run nothing else from the environments of the contestants, and
see :func:`tgi_cli.process.resident_memory.release_file_pages` for the benchmark's own pages.
https://docs.kernel.org/filesystems/proc.html
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.machine import descendants

INTERVAL = 0.1
"""Seconds between two looks at the resident sizes."""
GROWTH = 1.01
"""Growth of the resident sizes after which the proportional ones are read again."""


@dataclass(frozen=True)
class Memory:
    """Memory of a process and its descendants, in MB (10^6 bytes).

    Attributes:
        proportional: sum of the proportional sizes (Pss), with shared pages counted once.
        resident: sum of the resident sizes (RSS), with shared pages counted for each process.
        peak_resident: sum of each process's own peak of the latter, whenever that was.
    """

    proportional: float
    resident: float
    peak_resident: float


def memory(pid: int) -> Memory:
    """Measure the memory of a process tree."""
    proportional = resident = peak = 0
    for process in descendants(pid):
        try:
            status = Path(f"/proc/{process}/status").read_text()
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:  # it has exited
            continue
        proportional += _kilobytes(rollup, "Pss")
        resident += _kilobytes(status, "VmRSS")
        peak += _kilobytes(status, "VmHWM")
    return Memory(*(kilobytes * 1024 / 1e6 for kilobytes in (proportional, resident, peak)))


class PeakMemory:
    """Finds the peak of the proportional sizes of processes that start while it is entered.

    They are this process's descendants; those that were there before do not count.

    The kernel keeps no such peak, and computes a proportional size by a walk over all pages of a
    process: milliseconds for a gigabyte, in which the process cannot map others. So a thread looks
    ten times a second at the resident sizes, which are a few microseconds each, and reads the
    proportional ones when the former have reached a new peak, by 1 % at least. A process that does
    not grow is not disturbed, one that starts is for some hundredths of the time. Peaks shorter
    than the interval may be missed; ``peak_resident`` of :class:`Memory` has them.

    Attributes:
        megabytes: the peak so far, in MB (10^6 bytes).
    """

    def __init__(self) -> None:
        self.megabytes = 0.0
        self._highest = 0
        self._earlier: frozenset[int] = frozenset()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._earlier = frozenset(descendants(os.getpid()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            pids = [pid for pid in descendants(os.getpid()) if pid not in self._earlier]
            resident = sum(_resident_pages(pid) for pid in pids)
            if resident > self._highest * GROWTH:
                self._highest = resident
                self.megabytes = max(self.megabytes, _proportional(pids))


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # it has exited
        return 0


def _proportional(pids: list[int]) -> float:
    """The sum of proportional sizes in MB."""
    kilobytes = 0
    for pid in pids:
        try:
            kilobytes += _kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss")
        except OSError:  # it has exited
            continue
    return kilobytes * 1024 / 1e6


def _kilobytes(text: str, key: str) -> int:
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0
