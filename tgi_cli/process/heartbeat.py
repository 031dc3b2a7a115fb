"""A model server's heartbeat: memory that it writes and its launcher reads.

Neither waits for the other. The beats show that the process runs at all; the progress while
requests are live shows that its engine does. Before the model server serves, it publishes what it
serves. The memory has no name in the file system and is gone with the last of the two processes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from tgi_cli.errors import ConfigError
from tgi_cli.process.spawn import open_memory_file

BEAT_SECONDS = 0.25

PATIENCE = 4.0
"""A step counts as hung after this multiple of its estimated worst time."""

_FIELDS = struct.Struct("@5Q")
"""Beats, state, progress, live requests, microseconds of the worst step."""
_LENGTH = struct.Struct("@Q")
"""Length of the engine's info, which follows as JSON; 0 before it is published."""
_INFO_START = _FIELDS.size + _LENGTH.size
_ERROR = "error"
_ERROR_CHARACTERS = 2000
_SIZE = 64 * 1024
"""Far more than an info takes; pages that are never written take no memory."""


class State(IntEnum):
    """Phase of a model server's life."""

    STARTING = 0
    LOADING = 1
    WARMING_UP = 2
    SERVING = 3
    DRAINING = 4


class ProgressSource(Protocol):
    """The part of :class:`tgi_cli.engine.core.EngineCore` that a heartbeat shows."""

    @property
    def progress(self) -> int: ...

    @property
    def live_requests(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HeartbeatReading:
    """A heartbeat at one moment.

    Attributes:
        beats: Count that grows as long as the process runs.
        state: Phase of the process.
        progress: Count that grows while the engine works.
        live: Requests that wait or run.
        step_seconds: Longest time that a step may take; 0 if unknown.
    """

    beats: int
    state: State
    progress: int
    live: int
    step_seconds: float


class SharedHeartbeat:
    """One end of the shared memory.

    It is written by the main thread, and from :meth:`HeartbeatWriter.beating` on by its thread.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE)

    @classmethod
    def create(cls) -> SharedHeartbeat:
        """Create zeroed memory, whose descriptor a child inherits."""
        fd = open_memory_file("tgi-heartbeat")
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    @classmethod
    def attach(cls, fd: int) -> SharedHeartbeat:
        """Open the other end from an inherited descriptor. Raises ConfigError if it is invalid."""
        try:
            heartbeat = cls(fd)
        except (OSError, ValueError) as error:
            raise ConfigError(f"descriptor {fd} is not a model server's heartbeat") from error
        os.set_inheritable(fd, False)
        return heartbeat

    def read(self) -> HeartbeatReading:
        beats, state, progress, live, step_us = _FIELDS.unpack_from(self._memory)
        return HeartbeatReading(beats, State(state), progress, live, step_us / 1e6)

    def write(self, reading: HeartbeatReading) -> None:
        step_us = int(reading.step_seconds * 1e6)
        values = (reading.beats, reading.state, reading.progress, reading.live, step_us)
        _FIELDS.pack_into(self._memory, 0, *values)

    def publish(self, info: Mapping[str, Any]) -> None:
        """Write the engine's info as JSON. Call it once, before the state becomes SERVING."""
        text = json.dumps(info).encode()
        self._memory[_INFO_START : _INFO_START + len(text)] = text
        _LENGTH.pack_into(self._memory, _FIELDS.size, len(text))

    def publish_error(self, cause: str) -> None:
        """Write why the model server ends, in place of the info."""
        self.publish({_ERROR: cause[:_ERROR_CHARACTERS]})

    def error(self) -> str:
        """Return why the model server has ended, or an empty string if it did not say."""
        return str((self.published() or {}).get(_ERROR, ""))

    def published(self) -> dict[str, Any] | None:
        """Return the engine's info, or None before :meth:`publish`."""
        (length,) = _LENGTH.unpack_from(self._memory, _FIELDS.size)
        if not length:
            return None
        info: dict[str, Any] = json.loads(self._memory[_INFO_START : _INFO_START + length])
        return info

    def close_fd(self) -> None:
        """Close the descriptor once a child has inherited it; the memory stays mapped."""
        os.close(self.fd)


class HeartbeatWriter:
    """Writes a heartbeat a few times a second, in a thread.

    Args:
        heartbeat: Memory to write to, or None to write nothing.
    """

    def __init__(self, heartbeat: SharedHeartbeat | None) -> None:
        self._heartbeat = heartbeat
        self._state = State.LOADING
        self._engine: ProgressSource | None = None
        self._step_seconds = 0.0
        self._beats = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def beating(self) -> Iterator[HeartbeatWriter]:
        """Beat until the end of the block."""
        if self._heartbeat is None:
            yield self
            return
        thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join()

    def enter(self, state: State) -> None:
        """Write a new state."""
        self._state = state
        self._write()

    def publish(self, info: Mapping[str, Any]) -> None:
        """Publish the engine's info; see :meth:`SharedHeartbeat.publish`."""
        if self._heartbeat is not None:
            self._heartbeat.publish(info)

    def publish_error(self, cause: str) -> None:
        """Publish why the process ends; see :meth:`SharedHeartbeat.publish_error`."""
        if self._heartbeat is not None:
            self._heartbeat.publish_error(cause)

    def watch(self, engine: ProgressSource, step_seconds: float) -> None:
        """Show the progress of an engine that serves; its worst step takes ``step_seconds``."""
        self._engine, self._step_seconds = engine, step_seconds
        self.enter(State.SERVING)

    def _beat(self) -> None:
        while not self._stopped.is_set():
            self._write()
            self._stopped.wait(BEAT_SECONDS)

    def _write(self) -> None:
        if self._heartbeat is None:
            return
        engine = self._engine
        progress, live = (0, 0) if engine is None else (engine.progress, engine.live_requests)
        with self._lock:
            self._beats += 1
            self._heartbeat.write(
                HeartbeatReading(self._beats, self._state, progress, live, self._step_seconds)
            )


class StallDetector:
    """Measures for how long a value has not changed.

    Only time during which the value was polled counts: while the observer itself was stopped, or
    the machine slept, nothing could change.

    Args:
        longest: Seconds between two polls that count at most.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._value: Hashable = None
        self._polled: float | None = None
        self._stalled = 0.0

    def poll(self, value: Hashable, now: float) -> float:
        """Return the seconds for which ``value`` has not changed; 0 for None, which is idle."""
        passed = 0.0 if self._polled is None else min(now - self._polled, self._longest)
        self._polled = now
        if value is None or value != self._value:
            self._value, self._stalled = value, 0.0
        else:
            self._stalled += passed
        return self._stalled


def allowed_seconds(timeout: float, step_seconds: float) -> float:
    """Return how long an engine with live requests may make no progress.

    Args:
        timeout: The user's ``--watchdog-timeout``.
        step_seconds: Longest time that a step may take; 0 if unknown.
    """
    return max(timeout, PATIENCE * step_seconds)
