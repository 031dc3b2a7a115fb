"""Measures a server under load: latency of /health, gaps of a stream, memory of its processes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Array
from pathlib import Path
from typing import Any

from tests.tools.process_tree import command_of, descendants_of

FRONT = "front"
"""Role of the process in front of several models."""
PROBE_SECONDS = 0.002
"""Interval between two requests of the probe."""
_EPOCH, _SEEN, _SENT, _DONE, _WORST, _RAW, _FAILED, _PID, _LAST = range(9)
_SLOTS = 9


@dataclass
class Observation:
    """What a :class:`Monitor` measured between ``begin`` and ``end``.

    Attributes:
        stall: longest latency of /health in seconds, less the time that the router and the
            probe waited for a CPU.
        raw_stall: the same including that time.
        gap: longest time between two events of the stream in seconds.
        growth: largest increase in bytes of a process's memory, by role.
        failed: number of requests to /health without a 200.
        lost: roles whose process died.
        guarded: processes that the monitor killed because they grew too large.
    """

    stall: float = 0.0
    raw_stall: float = 0.0
    gap: float = 0.0
    growth: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    lost: list[str] = field(default_factory=list)
    guarded: list[str] = field(default_factory=list)


def run_queue_seconds(pid: int, cache: dict[int, int]) -> float:
    """Return how long the main thread of a process has waited for a CPU (schedstat)."""
    if not pid:
        return 0.0
    try:
        if pid not in cache:
            cache[pid] = os.open(f"/proc/{pid}/task/{pid}/schedstat", os.O_RDONLY)
        return int(os.pread(cache[pid], 80, 0).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _probe(shared: Any, address: tuple[str, int]) -> None:
    """Poll /health forever, in a process of its own so that no other work delays it."""
    own, files = os.getpid(), dict[int, int]()
    request = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    connection: socket.socket | None = None
    while True:
        epoch, router = shared[_EPOCH], int(shared[_PID])
        before = run_queue_seconds(router, files) + run_queue_seconds(own, files)
        shared[_SENT] += 1
        began = time.monotonic()
        healthy = False
        try:
            if connection is None:
                connection = socket.create_connection(address, timeout=120)
            connection.sendall(request)
            healthy = b" 200 " in connection.recv(4096)
        except OSError:
            pass
        raw = time.monotonic() - began
        waiting = max(
            run_queue_seconds(router, files) + run_queue_seconds(own, files) - before, 0.0
        )
        stall = max(raw - waiting, 0.0)
        if not healthy:
            with contextlib.suppress(OSError, AttributeError):
                connection.close()  # type: ignore[union-attr]
            connection = None
        if epoch == shared[_EPOCH]:
            if shared[_SEEN] != epoch:
                shared[_WORST], shared[_RAW], shared[_FAILED] = 0.0, 0.0, 0
                shared[_SEEN] = epoch
            shared[_WORST] = max(shared[_WORST], stall)
            shared[_RAW] = max(shared[_RAW], raw)
            shared[_FAILED] += not healthy
        shared[_DONE] += 1
        time.sleep(PROBE_SECONDS if healthy else 0.05)


def _stream(shared: Any, address: tuple[str, int], key: str) -> None:
    """Read one stream after the other, forever."""
    body = {
        "model": "tgi",
        "prompt": "def read_json(path):",
        "max_tokens": 1500,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, 120) as connection:
            connection.sendall(request)
            last = 0.0
            while chunk := connection.recv(1 << 16):
                now = time.monotonic()
                epoch = shared[_EPOCH]
                if shared[_SEEN] != epoch:
                    shared[_WORST], shared[_SEEN] = 0.0, epoch
                if last and b"data:" in chunk:
                    shared[_WORST] = max(shared[_WORST], now - last)
                if b"data:" in chunk:
                    shared[_LAST] = last = now
            shared[_LAST] = 0.0
        time.sleep(0.005)


def memory_of(pid: int, name: str) -> int:
    """Return VmRSS or VmHWM of a process in bytes, 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024
    return 0


def role_of(pid: int) -> str:
    """Return the role of a process of the server."""
    with contextlib.suppress(OSError):
        words = command_of(pid).split()
        for word, role in (
            ("model-server", "model server"),
            ("router", "router"),
            ("serve", "launcher"),
        ):
            if word in words:
                return role
    return "worker"


class Monitor:
    """Monitors a server.

    Args:
        address: host and port.
        root: process ID of the launcher, or 0 not to measure memory.
        key: API key.
        guard: growth in bytes at which a process is killed.
        front: ``root`` is the process in front of several models, which responds itself.
    """

    def __init__(
        self, address: tuple[str, int], root: int, key: str, guard: int, front: bool = False
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._probe_state: Any = Array("d", _SLOTS, lock=False)
        self._stream_state: Any = Array("d", _SLOTS, lock=False)
        self._guard = guard
        self._known: dict[int, str] = {}
        self._before: dict[int, int] = {}
        self._first_sizes: dict[int, int] = {}
        self._guarded: list[str] = []
        self._closed = threading.Event()
        self._front = front
        self.root = root
        self.renew(root)
        self._processes = [
            context.Process(target=_probe, args=(self._probe_state, address), daemon=True),
            context.Process(target=_stream, args=(self._stream_state, address, key), daemon=True),
        ]
        for process in self._processes:
            process.start()
        self._thread = threading.Thread(target=self._guard_memory, daemon=True)
        self._thread.start()

    def renew(self, root: int) -> None:
        """Monitor the processes of a restarted server."""
        self.root = root
        self._first_sizes.clear()
        self._known = self._processes_now()
        probed = FRONT if self._front else "router"
        self._probe_state[_PID] = next((p for p, r in self._known.items() if r == probed), 0)

    def begin(self, seconds: float = 20.0) -> None:
        """Start an observation; waits until /health has responded once more."""
        self._known = self._processes_now()
        self._guarded.clear()
        self._before = {}
        for pid in self._known:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
            self._before[pid] = memory_of(pid, "VmRSS")
        for state in (self._probe_state, self._stream_state):
            state[_EPOCH] += 1
        # A request sent before would not count, even if the observed work delays it.
        limit = time.monotonic() + seconds
        while self._probe_state[_SEEN] != self._probe_state[_EPOCH] and time.monotonic() < limit:
            time.sleep(0.001)

    def end(self, seconds: float = 60.0) -> Observation:
        """End the observation; waits for a response of /health that is requested after the call."""
        sent = self._probe_state[_SENT]
        limit = time.monotonic() + seconds
        while self._probe_state[_DONE] <= sent and time.monotonic() < limit:
            time.sleep(0.001)
        seen = Observation(guarded=list(self._guarded))
        if self._probe_state[_DONE] <= sent:
            seen.stall = seen.raw_stall = seconds
        if self._probe_state[_SEEN] == self._probe_state[_EPOCH]:
            seen.stall = max(seen.stall, self._probe_state[_WORST])
            seen.raw_stall = max(seen.raw_stall, self._probe_state[_RAW])
            seen.failed = int(self._probe_state[_FAILED])
        stream = self._stream_state
        if stream[_SEEN] == stream[_EPOCH]:
            seen.gap = stream[_WORST]
        if stream[_LAST]:
            seen.gap = max(seen.gap, time.monotonic() - stream[_LAST])
        now = self._processes_now() if self.root else {}
        for pid, role in now.items():
            peak = memory_of(pid, "VmHWM")
            # Workers started since `begin` count from their first measured size.
            before = self._before.get(pid, self._first_sizes.get(pid, peak))
            seen.growth[role] = max(seen.growth.get(role, 0), peak - before)
        seen.lost = [r for pid, r in self._known.items() if r != "worker" and pid not in now]
        return seen

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for process in self._processes:
            process.kill()
            process.join()

    def _processes_now(self) -> dict[int, str]:
        return dict(self._find()) if self.root else {}

    def _find(self) -> Iterator[tuple[int, str]]:
        with contextlib.suppress(OSError):
            for pid in (self.root, *descendants_of(self.root)):
                if memory_of(pid, "VmRSS"):  # 0 if it has ended
                    yield pid, FRONT if self._front and pid == self.root else role_of(pid)

    def _guard_memory(self) -> None:
        """Kill processes that grow beyond the guard; record the first size of new ones."""
        found: dict[int, str] = {}
        iteration = 0
        while not self._closed.wait(0.01):
            if iteration % 20 == 0:
                found = self._processes_now()
            iteration += 1
            for pid, role in found.items():
                size = memory_of(pid, "VmRSS")
                first = self._first_sizes.setdefault(pid, size)
                if size - first > self._guard:
                    self._guarded.append(f"{role} at {size >> 20} MB")
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.1)
