"""The child's side of :mod:`tgi_cli.process.worker_pool`: a process of bounded time and memory.

It may be killed at any time, and bounds itself: what its work costs is known only afterwards.
Messages are four bytes of length, most significant first, and a body. The first body to come in
is JSON: the limits, and ``setup`` for the work. Each further one is a job, answered with JSON.

Imports the standard library alone, and little of it: every process pays for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from tgi_cli.process.framing import encode_frame, read_frame, read_length

OUT_OF_MEMORY = 77
"""Exit code of a process that had no memory left even to say so."""

Work = Callable[[bytes], dict[str, Any]]
"""A job's body to its answer; what it raises but MemoryError is a defect."""


def serve(begin: Callable[[Any], Work]) -> None:
    """Answer until the input ends; ``begin`` makes the work of its setup."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    told = json.loads(first)
    work = begin(told["setup"])
    # What is imported and built once does not count.
    limit = MemoryLimit(told["megabytes"], told["bytes_per_byte"])
    _send(target, b"{}")
    # From here on, what a library says while it dies is no news: the parent tells of it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        while (length := read_length(source)) is not None:
            limit.apply(length)
            body = source.read(length)
            if len(body) < length:
                return
            # The parent kills a process that is late; unless the parent is gone itself.
            signal.setitimer(signal.ITIMER_REAL, told["seconds"] + 2)
            answer, last = _answer(work, body)
            signal.setitimer(signal.ITIMER_REAL, 0)
            # Memory that was used once is seldom given back.
            last = last or limit.half_used
            _send(target, answer[:-1] + (b', "last": true}' if last else b', "last": false}'))
            if last:
                return
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _answer(work: Work, body: bytes) -> tuple[bytes, bool]:
    """JSON of an object with members, and whether the process is not to be used again."""
    try:
        # As it is: escapes take up to six bytes for each of UTF-8.
        answer = json.dumps({"answer": work(body)}, ensure_ascii=False)
        return answer.encode(errors="surrogatepass"), False
    except MemoryError:
        return b'{"exhausted": true}', True
    except BaseException as error:  # among them, what libraries make of their own defects
        cause = f"{type(error).__name__}: {error}"[:1000]
    return json.dumps({"defect": cause}).encode(), True


class PeakMemory:
    """The most memory that a job has had at once, beyond what it began with.

    Linux alone says so (https://docs.kernel.org/filesystems/proc.html, ``clear_refs``); elsewhere
    it is 0.
    """

    def __init__(self) -> None:
        self._before = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's

    def begin(self) -> None:
        """A job begins: what earlier ones have left is given back, as it would hide growth."""
        if self._trim is not None:
            self._trim(ctypes.c_size_t(0))
        with contextlib.suppress(OSError):
            clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
            try:
                os.write(clear, b"5")
            finally:
                os.close(clear)
        self._before = _peak()

    @property
    def grown(self) -> int:
        """Bytes so far."""
        return _peak() - self._before


def _peak() -> int:
    try:
        status = os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return 0
    try:
        lines = os.read(status, 1 << 16).splitlines()
    finally:
        os.close(status)
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(b"VmHWM:")), 0)


class MemoryLimit:
    """Bounds what the process may take beyond what it has now; without /proc, nothing.

    Args:
        megabytes: for any job.
        bytes_per_byte: for a job whose body is so large that this comes to more.
    """

    def __init__(self, megabytes: int, bytes_per_byte: int) -> None:
        self._bytes = megabytes << 20
        self._factor = bytes_per_byte
        self._allowed = 0
        self._hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._statm = None
        with contextlib.suppress(FileNotFoundError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._size, self._resident = self._now()

    def _now(self) -> tuple[int, int]:
        """Bytes of address space, and of memory."""
        if self._statm is None:
            return 0, 0
        size, resident, *_ = os.pread(self._statm, 256, 0).split()
        return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()

    def apply(self, length: int) -> None:
        """Allow what a job with a body of ``length`` bytes may take."""
        allowed = max(self._bytes, self._factor * length)
        if self._statm is None or allowed == self._allowed:
            return
        self._allowed = allowed
        size = self._size + allowed
        if self._hard == resource.RLIM_INFINITY or size < self._hard:
            resource.setrlimit(resource.RLIMIT_AS, (size, self._hard))

    @property
    def half_used(self) -> bool:
        """Whether jobs that are done still hold half of what the next one may take."""
        size, resident = self._now()
        most = self._bytes // 2
        return size > self._size + most or resident > self._resident + most


def _send(target: BinaryIO, body: bytes) -> None:
    target.write(encode_frame(body))
    target.flush()
