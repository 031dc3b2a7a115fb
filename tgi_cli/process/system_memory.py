"""Memory of the system and of the control groups that this process is in.

Both hierarchies of control groups are read:
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
"""Root of the file systems read here; tests replace it."""

_UNLIMITED = 1 << 60
"""Version 1 represents "no limit" by the largest page-aligned number; no real limit is as large."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One level of a control group hierarchy that limits memory."""

    limit: int
    used: int
    """Without the file cache, which the kernel drops before it refuses memory."""


def available_system_memory() -> int | None:
    """Bytes that can be taken without swapping or being killed; None without ``/proc/meminfo``."""
    free = kernel_field(ROOT / "proc/meminfo", "MemAvailable")
    if free is None:
        return None
    return max(0, min([free, *(group.limit - group.used for group in control_groups())]))


def kernel_field(path: Path, name: str) -> int | None:
    """A ``Name:   123 kB`` line of a file in /proc, in bytes."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def control_groups() -> Iterator[ControlGroup]:
    """Every limited group that this process is in, from its own up to the root."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = "sys/fs/cgroup", "memory.max", "memory.current", "file"
        elif "memory" in controllers.split(","):
            root, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_cache"
        else:
            continue
        yield from _walk(ROOT / root, path, limit, used, f"{cache} ")


def _walk(root: Path, path: str, limit: str, used: str, cache: str) -> Iterator[ControlGroup]:
    # A container sees its own group mounted at the root while /proc names the path outside:
    # levels that do not exist here are skipped.
    folder = root / path.lstrip("/")
    while True:
        allowed = _number(folder / limit)
        if allowed is not None and allowed < _UNLIMITED:
            in_use = _number(folder / used) or 0
            yield ControlGroup(allowed, max(0, in_use - _statistic(folder / "memory.stat", cache)))
        if folder in (root, *root.parents):
            return
        folder = folder.parent


def _number(path: Path) -> int | None:
    """The number in a control file; None for ``max``, and if there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, prefix: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(prefix):
            return int(line[len(prefix) :])
    return 0
