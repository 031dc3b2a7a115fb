"""Processes of a server, from /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Children of any of the process's threads."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, listed.read_text().split())
    return found


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = children_of(pid)
    return [*found, *(one for child in found for one in descendants_of(child))]


def command_of(pid: int) -> str:
    """A process's command and arguments; empty if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    return ""


def shard_process_of(pid: int) -> int:
    """The process of the second shard of a model server with two."""
    (shard,) = [child for child in children_of(pid) if "tensor_parallel" in command_of(child)]
    return shard


def is_gone(pid: int) -> bool:
    """Whether a process has ended; it may remain a zombie if init does not reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
