"""What the kernel says of processes that it has killed for want of memory.

It counts them: in the cgroup of this process (``memory.events`` of version 2,
``memory.oom_control`` of version 1) and, where neither is to be read, for the whole machine
(``/proc/vmstat``). https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_FIELD = "oom_kill"


@dataclass(frozen=True, slots=True)
class Kills:
    """How many there have been; ``where`` is "this cgroup" or "this machine"."""

    count: int
    where: str


def kills(root: Path = _ROOT) -> Kills | None:
    """The count so far; None: the kernel does not say. ``root`` is of the file system."""
    for file in _of_cgroup(root):
        count = _read(file)
        if count is not None:
            return Kills(count, "this cgroup")
    count = _read(root / "proc/vmstat")
    return None if count is None else Kills(count, "this machine")


def explain(before: Kills | None, now: Kills | None) -> str:
    """What is known of a death by SIGKILL, as a remedy's words.

    Args:
        before: the count when the process began.
        now: the count after its end.
    """
    if before is None or now is None or before.where != now.where:
        return (
            "a person, a service manager or the kernel may have done that, the last for want of "
            "memory: see the system's log"
        )
    killed = now.count - before.count
    if killed > 0:
        processes = "a process" if killed == 1 else f"{killed} processes"
        return (
            f"since it began, the kernel has killed {processes} of {now.where} for want of memory: "
            "try a smaller model or cache (--max-batch-total-tokens)"
        )
    return (
        "the kernel did not do that for want of memory (it counts such kills): a person or a "
        "service manager may have, see the system's log"
    )


def _of_cgroup(root: Path) -> list[Path]:
    """Where the count of this process's cgroup may stand."""
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
