"""Memory that a process does not need goes back, and nothing that it needs is lost."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tgi_cli.process.resident_memory import release_file_pages, trim_heap

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")

PAGE = mmap.PAGESIZE
PAGES = 64


def resident(path: Path) -> list[int]:
    """Kilobytes of each mapping of a file that are resident."""
    found, counts = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(path)):
            counts = True
        elif counts and line.startswith("Rss:"):
            found.append(int(line.split()[1]))
            counts = False
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "library"
    path.write_bytes(b"".join(bytes([number]) * PAGE for number in range(PAGES)))
    return path


def mapped(path: Path, access: int) -> mmap.mmap:
    with path.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=access)


def content(mapping: mmap.mmap) -> list[int]:
    return [mapping[number * PAGE] for number in range(PAGES)]


def test_pages_of_files_are_dropped_and_come_back(file: Path) -> None:
    mapping = mapped(file, mmap.PROT_READ)
    assert content(mapping) == list(range(PAGES))
    (before,) = resident(file)
    assert before == PAGES * PAGE // 1024
    release_file_pages()
    assert sum(resident(file)) == 0
    assert content(mapping) == list(range(PAGES))
    mapping.close()


def test_pages_that_were_changed_keep_what_was_written(file: Path) -> None:
    """As those of a library's constants that the loader has relocated."""
    mapping = mapped(file, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping[5 * PAGE] = 99
    release_file_pages()
    assert mapping[5 * PAGE] == 99, "it can be written"
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), PAGES * PAGE, mmap.PROT_READ) == 0
    release_file_pages()
    assert ctypes.string_at(address + 5 * PAGE, 1) == bytes([99])
    assert ctypes.string_at(address + 6 * PAGE, 1) == bytes([6])


def test_anonymous_memory_is_left_alone() -> None:
    memory = mmap.mmap(-1, PAGES * PAGE)
    memory[:3] = b"abc"
    blocks = [bytearray(b"x" * 1000) for _ in range(1000)]
    release_file_pages()
    trim_heap()
    assert memory[:3] == b"abc"
    assert all(block == b"x" * 1000 for block in blocks)
    memory.close()


ARENAS = """
import ctypes, threading
from tgi_cli.process.resident_memory import limit_arenas
{limit}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
held, all_at_once = [], threading.Barrier(6)
def take():
    all_at_once.wait()
    held.extend(libc.malloc(1000) for _ in range(100))
    all_at_once.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fopen(b"{path}", b"w"))
libc.malloc_info(0, stream)
libc.fclose(stream)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_info is glibc's")
def test_threads_share_the_arenas_that_there_are(tmp_path: Path) -> None:
    def arenas(limit: str) -> int:
        report = tmp_path / "report"
        program = ARENAS.format(limit=limit, path=report)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        return report.read_text().count("<heap nr=")

    assert arenas("") > 2
    assert arenas("limit_arenas(2)") <= 2
