"""The child's side of :mod:`tgi_cli.process.worker_pool`: a process of bounded time and memory.

It may be killed at any time, and limits itself, as the cost of a job is known only afterwards.
Messages are frames (:mod:`tgi_cli.process.framing`). The first is JSON with the limits and the
``setup`` of the work. Each further one is a job, answered with JSON that buffers may follow.

It imports little, and only the standard library, as every process pays for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from tgi_cli.process.framing import encode_frame, read_frame, read_length

OUT_OF_MEMORY = 77
"""Exit code of a process that had too little memory left to report it."""

Reply = dict[str, Any] | tuple[dict[str, Any], Sequence[Any]]
"""An answer: JSON values, and buffers that follow them as they are."""
Work = Callable[[bytes], Reply]
"""Computes a job's answer from its body; any exception but MemoryError is a defect."""


def serve(begin: Callable[[Any], Work]) -> None:
    """Answer jobs until the input ends; ``begin`` creates the work from its setup."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    hello = json.loads(first)
    work = begin(hello["setup"])
    # Imports and tables that are built once do not count.
    limit = MemoryLimit(hello["megabytes"], hello["bytes_per_byte"])
    _send(target, b"{}")
    # The parent reports how the process dies; what libraries write then is noise.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        while (length := read_length(source)) is not None:
            limit.apply(length)
            body = source.read(length)
            if len(body) < length:
                return
            # Normally the parent kills a process that is late, unless it is gone itself.
            signal.setitimer(signal.ITIMER_REAL, hello["seconds"] + 2)
            answer, data, last = _answer(work, body)
            signal.setitimer(signal.ITIMER_REAL, 0)
            # Memory that was used once is seldom returned to the system.
            last = last or limit.half_used
            _send(target, answer[:-1] + (b', "last": true}' if last else b', "last": false}'), data)
            del body, data
            if last:
                return
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _answer(work: Work, body: bytes) -> tuple[bytes, Sequence[Any], bool]:
    """Return the answer as JSON, its buffers, and whether the process must not be reused."""
    try:
        found = work(body)
        fields, data = found if isinstance(found, tuple) else (found, ())
        # Not escaped: an escape takes up to six bytes for one of UTF-8.
        answer = json.dumps(
            {"answer": fields, "bytes": sum(memoryview(buffer).nbytes for buffer in data)},
            ensure_ascii=False,
        )
        return answer.encode(errors="surrogatepass"), data, False
    except MemoryError:
        return b'{"exhausted": true}', (), True
    except BaseException as error:  # such as a panic of a library
        cause = f"{type(error).__name__}: {error}"[:1000]
    return json.dumps({"defect": cause}).encode(), (), True


class PeakMemory:
    """The peak memory of a job, beyond that at its start.

    Known on Linux only (https://docs.kernel.org/filesystems/proc.html, ``clear_refs``); elsewhere
    it is 0.
    """

    def __init__(self) -> None:
        self._before = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's

    def begin(self) -> None:
        """Begin a job. Memory that earlier jobs left is returned first, as it would hide growth."""
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
        """Bytes of growth so far."""
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
    """Limits the memory that the process may take beyond its present size; needs /proc.

    Args:
        megabytes: For any job.
        bytes_per_byte: For each byte of a job's body, if that is more.
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
        """Return the bytes of address space and of resident memory."""
        if self._statm is None:
            return 0, 0
        size, resident, *_ = os.pread(self._statm, 256, 0).split()
        return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()

    def apply(self, length: int) -> None:
        """Set the limit for a job with a body of ``length`` bytes."""
        allowed = max(self._bytes, self._factor * length)
        if self._statm is None or allowed == self._allowed:
            return
        self._allowed = allowed
        size = self._size + allowed
        if self._hard == resource.RLIM_INFINITY or size < self._hard:
            resource.setrlimit(resource.RLIMIT_AS, (size, self._hard))

    @property
    def half_used(self) -> bool:
        """Whether finished jobs still hold half of the memory that the next one may take."""
        size, resident = self._now()
        most = self._bytes // 2
        return size > self._size + most or resident > self._resident + most


def _send(target: BinaryIO, body: bytes, data: Sequence[Any] = ()) -> None:
    target.write(encode_frame(body))
    for buffer in data:
        target.write(buffer)
    target.flush()
