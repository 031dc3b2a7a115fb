"""The kernel's count of processes that it killed because memory ran out.

It counts them in the cgroup of this process (``memory.events`` of version 2,
``memory.oom_control`` of version 1) and, if neither is readable, for the whole machine
(``/proc/vmstat``). https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_FIELD = "oom_kill"


@dataclass(frozen=True, slots=True)
class Kills:
    """Number of kills so far; ``where`` is "this cgroup" or "this machine"."""

    count: int
    where: str


def kills(root: Path = _ROOT) -> Kills | None:
    """Return the count so far, or None if it is unknown; ``root`` is that of the file system."""
    for file in _of_cgroup(root):
        count = _read(file)
        if count is not None:
            return Kills(count, "this cgroup")
    count = _read(root / "proc/vmstat")
    return None if count is None else Kills(count, "this machine")


def explain(before: Kills | None, now: Kills | None) -> str:
    """Explain a death by SIGKILL, as an error's remedy.

    Args:
        before: The count when the process began.
        now: The count after its end.
    """
    if before is None or now is None or before.where != now.where:
        return (
            "a user, a service manager or the kernel's out-of-memory killer did that: see the "
            "system's log"
        )
    killed = now.count - before.count
    if killed > 0:
        processes = "a process" if killed == 1 else f"{killed} processes"
        return (
            f"since it began, the kernel killed {processes} of {now.where} because memory ran out: "
            "try a smaller model or cache (--max-batch-total-tokens)"
        )
    return (
        "memory did not run out (the kernel counts such kills): a user or a service manager did "
        "that, see the system's log"
    )


def _of_cgroup(root: Path) -> list[Path]:
    """Return the files that may have the count of this process's cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.lstrip("/")
        if not controllers:
            found.append(root / "sys/fs/cgroup" / path / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(root / "sys/fs/cgroup/memory" / path / "memory.oom_control")
    return found


def _read(file: Path) -> int | None:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields[_FIELD])
    except (OSError, ValueError, KeyError):
        return None
