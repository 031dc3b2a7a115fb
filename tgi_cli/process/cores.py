"""The processor cores that this process may use.

A control group's quota counts processors, whichever they are: more busy threads than it grants are
all stopped until its next period.
https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files, and of version 1
https://docs.kernel.org/scheduler/sched-bwc.html
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
"""Root of the file systems read here; tests replace it."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its socket, and those of its logical CPUs that this process may use."""

    socket: int
    cpus: tuple[int, ...]


def usable_cores() -> list[Core]:
    """The cores within affinity, at most as many as the quota grants; those of a socket in a row.

    Without known topology each logical CPU counts as a core.
    """
    cores = _cores(_affinity())
    quota = _quota()
    return cores if quota is None else cores[: max(1, math.ceil(quota))]


def pin(cpus: tuple[int, ...]) -> None:
    """Restrict this thread, and those that it will start, to these logical CPUs; empty: any.

    Does nothing where the system has no such call.
    """
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cores(cpus: set[int]) -> list[Core]:
    found: dict[str, list[int]] = {}
    sockets: dict[str, int] = {}
    for cpu in sorted(cpus):
        topology = _ROOT / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            siblings = (topology / "thread_siblings_list").read_text(encoding="ascii").strip()
        except OSError:
            return [Core(0, (cpu,)) for cpu in sorted(cpus)]
        found.setdefault(siblings, []).append(cpu)
        sockets.setdefault(siblings, _number(topology / "physical_package_id"))
    cores = [Core(sockets[siblings], tuple(threads)) for siblings, threads in found.items()]
    return sorted(cores, key=lambda core: (core.socket, core.cpus))


def _number(path: Path) -> int:
    """The number in a file; 0 if there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _quota() -> float | None:
    """CPUs that the control group grants (version 2, then 1); None if it sets no limit."""
    folder = _ROOT / "sys/fs/cgroup"
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit():
        return None
    return int(quota) / int(period)
