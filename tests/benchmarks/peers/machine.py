"""Describes the machine; measures the load of other programs and the memory bandwidth."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

READ = """
import json, time, torch
data = torch.ones(1 << 27)
rates = []
for _ in range(20):
    start = time.perf_counter()
    data.sum()
    rates.append(data.nbytes / (time.perf_counter() - start))
print(json.dumps(max(rates)))
"""


@dataclass(frozen=True)
class Clock:
    """CPU time since the machine started, in ticks.

    Attributes:
        busy: busy ticks of all cores, including time stolen by the hypervisor.
        total: all ticks of all cores.
        own: ticks of this process and its descendants, including exited ones.
    """

    busy: int
    total: int
    own: int

    @classmethod
    def read(cls) -> Clock:
        own = sum(_ticks(pid) for pid in descendants(os.getpid()))
        busy, total = cpu_ticks(Path("/proc/stat").read_text())
        return cls(busy, total, own)

    def foreign_since(self, before: Clock) -> float:
        """Return the share of all cores that other programs have used since ``before``, 0 to 1."""
        total = self.total - before.total
        others = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, others / total) if total else 0.0


def cpu_ticks(stat: str) -> tuple[int, int]:
    """Parse the busy and total ticks of all cores from the text of /proc/stat.

    The total is the sum of user, nice, system, idle, iowait, irq, softirq and steal; guest time is
    already included in user time. See proc_stat(5).
    """
    fields = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def descendants(pid: int) -> list[int]:
    """Return ``pid`` and the IDs of its running descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = (task / "children").read_text().split()
        except OSError:  # it has exited
            continue
        for child in children:
            found += descendants(int(child))
    return found


def _ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has exited, and its time counts for its parent
        return 0
    return process_ticks(stat)


def process_ticks(stat: str) -> int:
    """Parse user and system time from /proc/PID/stat, including waited-for children."""
    fields = stat.rpartition(")")[2].split()  # a program's name may contain blanks and parentheses
    return sum(int(field) for field in fields[11:15])


def read_bandwidth(python: Path) -> tuple[float, float]:
    """Return the memory read bandwidth of all cores in bytes per second, and the foreign share.

    The bandwidth is the best of 20 sums of 512 MB with torch, in a process of its own.
    """
    before = Clock.read()
    output = subprocess.run([python, "-c", READ], capture_output=True, text=True, check=True)
    return json.loads(output.stdout), Clock.read().foreign_since(before)


def description() -> dict[str, str | int | float]:
    """Describe the processor, its cores, memory and system."""
    cpu = Path("/proc/cpuinfo").read_text()
    pairs = (line.partition(":") for line in cpu.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set(fields.get("flags", "").split())
    notable = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": fields.get("model name", platform.processor()),
        "family": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "instructions": " ".join(flag for flag in notable if flag in flags),
        "memory_gb": round(pages / 1e9, 1),
        "system": platform.release(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
