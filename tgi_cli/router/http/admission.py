"""A limit of sequences in flight, and draining."""

from __future__ import annotations

import asyncio
import math
import time

from tgi_cli.router.http import errors

_DRAIN_RETRY_SECONDS = 5
_MAX_RETRY_SECONDS = 60


class ConcurrencyLimiter:
    """Limits the sequences in flight. Use from the event loop only.

    Attributes:
        limit: TGI's ``--max-concurrent-requests``.
        in_flight: sequences in flight.
        parked: those of them that wait for an engine that sleeps.
        draining: new sequences are refused.
        idle_since: time (``time.monotonic()``) since which nothing is in flight, if that is so.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self.parked = 0
        self.draining = False
        self.idle_since = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._mean_seconds = 0.0

    @property
    def active(self) -> int:
        """Sequences in flight that are not parked."""
        return self.in_flight - self.parked

    def enter(self, count: int = 1) -> None:
        """Admit sequences, or raise ApiError: 503 while draining, 429 beyond the limit."""
        if self.draining:
            raise errors.draining(_DRAIN_RETRY_SECONDS)
        if self.in_flight + count > self.limit:
            raise self.overloaded()
        self.in_flight += count
        self._update()

    def leave(self, seconds: float | None = None) -> None:
        """Release a sequence, after ``seconds`` of work if it was completed."""
        self.in_flight -= 1
        if seconds is not None:
            self._mean_seconds += (seconds - self._mean_seconds) / 16
        if self.in_flight == 0:
            self.idle_since = time.monotonic()
        self._update()

    def park(self, count: int) -> None:
        """Count sequences in flight as waiting for an engine that sleeps."""
        self.parked += count
        self._update()

    def unpark(self, count: int) -> None:
        """Count them as active again."""
        self.parked -= count
        self._update()

    def drain(self) -> None:
        """Refuse new sequences from now on."""
        self.draining = True

    async def idle(self) -> None:
        """Wait until no sequence is in flight."""
        await self._idle.wait()

    async def quiet(self) -> None:
        """Wait until none is active."""
        await self._quiet.wait()

    def overloaded(self) -> errors.ApiError:
        """A 429 with the mean time until a sequence ends (Little's law), within bounds."""
        estimate = math.ceil(self._mean_seconds / max(self.limit, 1))
        return errors.overloaded(min(max(estimate, 1), _MAX_RETRY_SECONDS))

    def _update(self) -> None:
        for event, count in ((self._idle, self.in_flight), (self._quiet, self.active)):
            if count:
                event.clear()
            else:
                event.set()
