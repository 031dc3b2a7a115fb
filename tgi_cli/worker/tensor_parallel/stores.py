"""The store in which the processes of a model find each other's addresses when they connect.

Process 0 has the values; the other processes request them on their channel of events. So only the
processes of a model can read or change them. A TCPStore of torch would let everyone do so who
reaches its port. https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.Store
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from tgi_cli.process.framing import Channel
from tgi_cli.worker.tensor_parallel.messages import StoreGet, StoreSet, StoreValue, encode

_WAIT = timedelta(seconds=300)
"""Time limit of a value, for callers that name none."""


class _Values(Store):
    """Values by their keys, for which callers wait."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failed = False

    # The names and the arguments are those by which torch calls a store.

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises RuntimeError if it does not come, or after :meth:`fail`."""
        return self._await(key, _WAIT)

    def wait(self, keys: list[str], timeout: timedelta = _WAIT) -> None:  # type: ignore[override, unused-ignore]
        """Wait for values. Raises as :meth:`get`."""
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            self._await(key, timedelta(seconds=end - time.monotonic()))

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def clone(self) -> _Values:
        """This store, which threads may share; torch clones stores that they may not."""
        return self

    def fail(self) -> None:
        """Make all waits raise RuntimeError, current and later ones."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def put(self, key: str, value: bytes) -> None:
        """Set a value that is known here."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _await(self, key: str, timeout: timedelta) -> bytes:
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed or key in self._values, timeout.total_seconds()
            )
            if key not in self._values:
                why = "a process is gone" if self._failed else "timed out"
                raise RuntimeError(f"waiting for {key}: {why}")
            return self._values[key]


class LeaderStore(_Values):
    """The store in process 0."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[str, list[Callable[[bytes], None]]] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override, unused-ignore]
        """Set a value, and send it to those who have asked for it."""
        with self._changed:
            self.put(key, value)
            asked = self._asked.pop(key, [])
        for answer in asked:
            answer(value)

    def handle(self, event: StoreSet | StoreGet, events: Channel) -> None:
        """Carry out what another process asks on its channel."""
        if isinstance(event, StoreSet):
            self.set(event.key, event.value)
            return

        def answer(value: bytes) -> None:
            with suppress(OSError):  # it is gone: the end of its channel shows it
                events.send(encode(StoreValue(event.key, value)))

        with self._changed:
            value = self._values.get(event.key)
            if value is None:
                self._asked.setdefault(event.key, []).append(answer)
                return
        answer(value)


class RemoteStore(_Values):
    """The store in another process; the receiver of its events calls :meth:`put`.

    Args:
        events: the process's channel.
    """

    def __init__(self, events: Channel) -> None:
        super().__init__()
        self._events = events
        self._asked: set[str] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override, unused-ignore]
        """Send a value to process 0."""
        self._events.send(encode(StoreSet(key, value)))

    def _await(self, key: str, timeout: timedelta) -> bytes:
        with self._changed:
            ask = key not in self._asked
            self._asked.add(key)
        if ask:
            self._events.send(encode(StoreGet(key)))
        return super()._await(key, timeout)
