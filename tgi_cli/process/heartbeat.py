"""A model server's pulse: what its launcher sees of it in memory, without asking it.

The process that is watched writes them on a thread of its own, the one that watches reads them;
neither waits for the other. What beats says that the process runs at all; what progresses while
requests are live says that its engine does. Before it serves, it says what it serves. Nothing of
it has a name in the file system, and it is gone with the last of the two.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from tgi_cli.errors import ConfigError

BEAT_SECONDS = 0.25

PATIENCE = 4.0
"""How many times its estimated worst a step may take before it counts as hung."""

_FIELDS = struct.Struct("@5Q")
"""Beats, state, progress, live requests, microseconds of the worst step."""
_LENGTH = struct.Struct("@Q")
"""Behind them: of the engine's info, which follows as JSON; 0: none yet."""
_INFO_START = _FIELDS.size + _LENGTH.size
_SIZE = 64 * 1024
"""Far more than an info takes; pages that nothing is written to take no memory."""


class State(IntEnum):
    """What a model server is at."""

    STARTING = 0
    LOADING = 1
    WARMING_UP = 2
    SERVING = 3
    DRAINING = 4


class Moving(Protocol):
    """What is to be seen of an engine; see :class:`tgi_cli.engine.core.EngineCore`."""

    @property
    def progress(self) -> int: ...

    @property
    def live_requests(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """A pulse at one moment.

    Attributes:
        beats: counted; it grows as long as the process runs.
        state: what it is at.
        progress: counted; it grows while the engine does what it has to.
        live: requests that wait or run.
        step_seconds: what a step may take at worst; 0: not known.
    """

    beats: int
    state: State
    progress: int
    live: int
    step_seconds: float


class SharedHeartbeat:
    """One end. Writers are the thread of :func:`beating` and, before it, the main thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE)

    @classmethod
    def make(cls) -> SharedHeartbeat:
        """New memory, all zero. The descriptor is for a child to inherit."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("tgi-pulse")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    @classmethod
    def of(cls, fd: int) -> SharedHeartbeat:
        """The other end, from an inherited descriptor. Raises ConfigError if it is none."""
        try:
            pulse = cls(fd)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--pulse-fd {fd} is not a model server's pulse",
                "leave it off: it is for the process that starts this one",
            ) from error
        os.set_inheritable(fd, False)
        return pulse

    def read(self) -> Reading:
        beats, state, progress, live, step_us = _FIELDS.unpack_from(self._memory)
        return Reading(beats, State(state), progress, live, step_us / 1e6)

    def write(self, reading: Reading) -> None:
        step_us = int(reading.step_seconds * 1e6)
        values = (reading.beats, reading.state, reading.progress, reading.live, step_us)
        _FIELDS.pack_into(self._memory, 0, *values)

    def publish(self, served: Mapping[str, Any]) -> None:
        """Write what is served, as JSON. Call it once, before the state becomes SERVING."""
        text = json.dumps(served).encode()
        self._memory[_INFO_START : _INFO_START + len(text)] = text
        _LENGTH.pack_into(self._memory, _FIELDS.size, len(text))

    def published(self) -> dict[str, Any] | None:
        """What is served, or None before :meth:`publish`."""
        (length,) = _LENGTH.unpack_from(self._memory, _FIELDS.size)
        if not length:
            return None
        served: dict[str, Any] = json.loads(self._memory[_INFO_START : _INFO_START + length])
        return served

    def hand_over(self) -> None:
        """The child has inherited the descriptor: it is not needed here any more."""
        os.close(self.fd)


class HeartbeatWriter:
    """Writes a pulse, a few times a second, from a thread of its own.

    Args:
        pulse: where to; None: nobody watches, and nothing is done.
    """

    def __init__(self, pulse: SharedHeartbeat | None) -> None:
        self._pulse = pulse
        self._state = State.LOADING
        self._engine: Moving | None = None
        self._step_seconds = 0.0
        self._beats = 0
        self._over = threading.Event()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def beating(self) -> Iterator[HeartbeatWriter]:
        """Beat until the end of the block."""
        if self._pulse is None:
            yield self
            return
        thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def enter(self, state: State) -> None:
        """Say what the process is at from now on."""
        self._state = state
        self._write()

    def publish(self, served: Mapping[str, Any]) -> None:
        """Publish what will be served; see :meth:`SharedHeartbeat.publish`."""
        if self._pulse is not None:
            self._pulse.publish(served)

    def watch(self, engine: Moving, step_seconds: float) -> None:
        """The engine serves: show its progress. ``step_seconds`` is of its worst step, or 0."""
        self._engine, self._step_seconds = engine, step_seconds
        self.enter(State.SERVING)

    def _beat(self) -> None:
        while not self._over.is_set():
            self._write()
            self._over.wait(BEAT_SECONDS)

    def _write(self) -> None:
        if self._pulse is None:
            return
        engine = self._engine
        progress, live = (0, 0) if engine is None else (engine.progress, engine.live_requests)
        with self._lock:
            self._beats += 1
            self._pulse.write(Reading(self._beats, self._state, progress, live, self._step_seconds))


class StallDetector:
    """For how long something that ought to move has stood still: what "hung" is measured by.

    It counts the time in which somebody looked. While the one who looks was stopped itself, or
    the machine slept, nobody is to blame.

    Args:
        longest: seconds between two looks that are counted at most.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._mark: Hashable = None
        self._seen: float | None = None
        self._still = 0.0

    def look(self, mark: Hashable, now: float) -> float:
        """Seconds for which ``mark`` has been the same; with None it need not move.

        Args:
            now: a clock's seconds.
        """
        passed = 0.0 if self._seen is None else min(now - self._seen, self._longest)
        self._seen = now
        if mark is None or mark != self._mark:
            self._mark, self._still = mark, 0.0
        else:
            self._still += passed
        return self._still


def allowed_seconds(timeout: float, step_seconds: float) -> float:
    """How long an engine with live requests may stand still.

    Args:
        timeout: what the user said, ``--watchdog-timeout``.
        step_seconds: what its worst step may take; 0: not known.
    """
    return max(timeout, PATIENCE * step_seconds)
