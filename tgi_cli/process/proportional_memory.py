"""The memory of a process and its descendants, without counting shared pages several times."""

from __future__ import annotations

from pathlib import Path


def tree_memory(pid: int) -> int:
    """Bytes of a process and everything that it started, by their proportional set sizes (Pss).

    A page that n processes share counts as an nth in each. Processes that end meanwhile, and
    those of other users, count as nothing. https://docs.kernel.org/filesystems/proc.html
    """
    return sum(_proportional_size(each) for each in _tree(pid))


def _tree(pid: int) -> list[int]:
    """The process, its children, and so on."""
    found = [pid]
    for each in found:  # which grows meanwhile
        for listed in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, listed.read_text(encoding="ascii").split())
            except OSError:
                continue
    return found


def _proportional_size(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
