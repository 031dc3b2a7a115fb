"""Where the memory of a server is: by process and by kind, before and after streams.

    python -m tests.tools.checkpoints --shape 135m /tmp/model
    python -m tests.benchmarks.memory MODEL [--flags "..."] [--streams 1 32] [--mappings 20]
    python -m tests.benchmarks.memory --pid PID

Starts ``tgi serve MODEL``, a checkpoint's folder or a GGUF file, sends waves of streams (prompts of
128 tokens, 128 new ones), and reads ``/proc/PID/smaps`` of all its processes, after each wave and
once the server has rested. With ``--pid``, reads those of a running server alone.

Figures are in MB (10^6 bytes). ``pss`` divides shared pages among their processes, so that its sum
is what the processes take together; ``rss`` counts them for each, and ``peak`` is the most that
``rss`` has been. Kinds:

===========  ======================================================================================
heap         of malloc: the first arena, and those of threads
large        other anonymous memory in mappings of 4 MB and more: weights, KV cache, large tensors
small        other anonymous memory: Python's objects, threads' stacks
torch, ...   files of that package: code, and data that the loader has relocated
model        files of the checkpoint that are mapped
files        all other files: the interpreter, the C library, other packages
shared       shared memory
===========  ======================================================================================

``dirty`` are the pages of files that are the process's own.

Other programs that use the same libraries lower ``pss``. With the right to see physical addresses
(root, or CAP_SYS_ADMIN), ``distinct`` is the size of all pages that any of the processes has.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.benchmarks.adversary.monitor import role_of
from tests.benchmarks.peers.contestant import Setup
from tests.benchmarks.peers.machine import descendants
from tests.benchmarks.peers.tgi import Tgi
from tgi_cli.engine.core import IDLE_SECONDS

PROMPT, NEW = 128, 128

KINDS = ("heap", "large", "small", "torch", "numpy", "grpc", "model", "files", "shared")
PACKAGES = ("torch", "numpy", "grpc")
_ARENA = 64 << 20
"""Alignment and largest size of glibc's arenas of threads."""
_LARGE = 4 << 20
_PRESENT_BIT = 63
_FRAME_MASK = (1 << 55) - 1
"""Of an entry of pagemap."""
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")


@dataclass
class Mapping:
    """One mapping of a process, in kB."""

    begin: int
    end: int
    mode: str
    path: str
    fields: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """One of KINDS."""
        size = self.end - self.begin
        if self.path.startswith("/dev/shm") or "memfd:" in self.path or "s" in self.mode:
            return "model" if self.path.endswith(".safetensors") else "shared"
        if self.path.startswith("/"):
            if self.path.endswith((".safetensors", ".gguf")):
                return "model"
            found = [name for name in PACKAGES if f"/{name}" in self.path]
            return found[0] if found else "files"
        if self.path == "[heap]":
            return "heap"
        # An arena's mapping begins at a multiple of its largest size; the rest has no access.
        if self.begin % _ARENA == 0 and size <= _ARENA and not self.path:
            return "heap"
        return "large" if size >= _LARGE and not self.path else "small"


def mappings(pid: int) -> list[Mapping]:
    """All mappings of a process that have pages; none if it has exited."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except OSError:
        return []
    return [each for each in _parse(text) if each.fields.get("Rss")]


def _parse(smaps: str) -> Iterator[Mapping]:
    current: Mapping | None = None
    for line in smaps.splitlines():
        head = _HEAD.fullmatch(line)
        if head is not None:
            if current is not None:
                yield current
            begin, end, mode, path = head.groups()
            current = Mapping(int(begin, 16), int(end, 16), mode, path)
        elif current is not None:
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                current.fields[name] = int(value.split()[0])
    if current is not None:
        yield current


def megabytes(kilobytes: int) -> float:
    return kilobytes * 1024 / 1e6


def report(pid: int, title: str, most: int) -> None:
    """Print the memory of a process and its descendants."""
    rows: list[tuple[str, dict[str, int], dict[str, int]]] = []
    for process in descendants(pid):
        sums: dict[str, int] = defaultdict(int)
        kinds: dict[str, int] = defaultdict(int)
        found = mappings(process)
        for each in found:
            kinds[each.kind] += each.fields["Pss"]
            sums["pss"] += each.fields["Pss"]
            sums["rss"] += each.fields["Rss"]
            sums["huge"] += each.fields.get("AnonHugePages", 0)
            if each.path.startswith("/"):
                sums["dirty"] += each.fields.get("Private_Dirty", 0)
        if found:
            sums["peak"] = _peak(process)
            rows.append((f"{role_of(process)} {process}", kinds, sums))
    columns = ("pss", "rss", "peak", "huge", "dirty")
    print(f"\n| {title} | {' | '.join((*columns, *KINDS))} |")
    print("|---" * (1 + len(columns) + len(KINDS)) + "|")
    total: dict[str, int] = defaultdict(int)
    for name, kinds, sums in rows:
        for key, value in (*kinds.items(), *sums.items()):
            total[key] += value
        _print_row(name, kinds, sums, columns)
    _print_row("all", total, total, columns)
    distinct = distinct_bytes(descendants(pid))
    if distinct is not None:
        print(f"distinct: {distinct / 1e6:.1f} MB", flush=True)
    for process in descendants(pid) if most else ():
        print(f"\n{role_of(process)} {process}: rss, dirty, mapping")
        largest = sorted(mappings(process), key=lambda each: -each.fields["Rss"])[:most]
        for each in largest:
            dirty = each.fields.get("Private_Dirty", 0)
            size = (each.end - each.begin) >> 10
            print(
                f"{megabytes(each.fields['Rss']):8.1f} {megabytes(dirty):8.1f}  {each.mode} "
                f"{megabytes(size):8.1f}  {each.kind}  {each.path}"
            )


def distinct_bytes(pids: list[int]) -> int | None:
    """The size of the pages that the processes have, each counted once.

    None without the right to see physical addresses.
    https://docs.kernel.org/admin-guide/mm/pagemap.html
    """
    page = os.sysconf("SC_PAGE_SIZE")
    frames = [np.empty(0, np.uint64)]
    for pid in pids:
        try:
            with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as table:
                for each in mappings(pid):
                    table.seek(each.begin // page * 8)
                    data = bytearray()
                    while part := table.read((each.end - each.begin) // page * 8 - len(data)):
                        data += part
                    entries = np.frombuffer(data, np.uint64)
                    present = entries[entries >> np.uint64(_PRESENT_BIT) == 1]
                    frames.append(present & np.uint64(_FRAME_MASK))
        except OSError:  # it has exited
            continue
    found = np.unique(np.concatenate(frames))
    # Without the right, all have the address 0.
    return None if found.size < 2 else int(found.size) * page


def _peak(pid: int) -> int:
    """The most kB that were resident; 0 if the process has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def _print_row(
    name: str, kinds: dict[str, int], sums: dict[str, int], columns: tuple[str, ...]
) -> None:
    values = [sums.get(each, 0) for each in columns] + [kinds.get(each, 0) for each in KINDS]
    print(f"| {name} | {' | '.join(f'{megabytes(value):.1f}' for value in values)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--pid", type=int, help="of a running server's launcher")
    parser.add_argument("--flags", default="", help="of tgi serve")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--mappings", type=int, default=0, help="show the largest, per process")
    options = parser.parse_args()
    if options.pid is not None:
        report(options.pid, "now", options.mappings)
        return
    if options.model is None:
        parser.error("name a checkpoint, or a process with --pid")
    most = max(options.streams)
    setup = Setup(most, PROMPT + NEW, most * (PROMPT + NEW))
    contestant = Tgi("tgi", Path(sys.executable), "{checkpoint}", options.flags)
    with tempfile.TemporaryDirectory() as folder:
        running = contestant.start(options.model, setup, Path(folder) / "log")
        try:
            report(running.process.pid, "ready", 0)
            for streams in options.streams:
                prompts = [
                    [5 + (7 * i + 31 * row) % 200 for i in range(PROMPT)] for row in range(streams)
                ]
                running.wave(prompts, NEW, 600.0)
                last = streams == options.streams[-1]
                report(running.process.pid, f"after {streams}", options.mappings if last else 0)
            time.sleep(IDLE_SECONDS + 2)
            report(running.process.pid, "idle", 0)
        finally:
            running.close()


if __name__ == "__main__":
    main()
