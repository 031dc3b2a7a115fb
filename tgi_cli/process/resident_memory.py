"""Returns memory that starting has taken, and serving does not need.

A process that has imported a hundred megabytes of libraries runs a few megabytes of their code from
then on. The pages of the rest stay resident until the system is short of memory, and count as the
process's in the meantime, as freed blocks of malloc do. All functions are for Linux and glibc; on
other systems they do nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_M_ARENA_MAX = -8
"""Parameter of mallopt."""

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ +/")
"""The head of a mapped file's lines in smaps: https://docs.kernel.org/filesystems/proc.html"""


def limit_arenas(count: int) -> None:
    """Let malloc take memory from at most ``count`` arenas, in place of eight per core.

    What a thread has freed is then of use to others. Call it before there are threads.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, count)


def trim_heap() -> None:
    """Return freed memory to the system, which glibc holds for the next allocation.

    https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def release_file_pages() -> None:
    """Drop the pages of code and constants in mapped files from this process.

    Pages that are used again are mapped again from the page cache, 16 at once. Pages that are not
    as in the file, because the loader has relocated them, stay. Takes 5 to 20 ms.
    https://man7.org/linux/man-pages/man2/madvise.2.html
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        smaps = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    for begin, end in _unchanged(smaps):
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _unchanged(smaps: str) -> Iterator[tuple[int, int]]:
    """The addresses of private mappings of files that cannot be written and never were."""
    found: tuple[int, int] | None = None
    for line in smaps.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            begin, end, mode = head.groups()
            found = (int(begin, 16), int(end, 16)) if mode[1] == "-" and mode[3] == "p" else None
        elif found is not None and line.startswith("Anonymous:"):
            if line.split()[1] == "0":
                yield found
            found = None
        elif found is not None and not line[:1].isupper():
            found = None  # another mapping, without a file
