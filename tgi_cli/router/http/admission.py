"""A limit of sequences in flight, and draining."""

from __future__ import annotations

import asyncio
import math

from tgi_cli.router.http import errors

_DRAIN_RETRY_SECONDS = 5
_MAX_RETRY_SECONDS = 60


class ConcurrencyLimiter:
    """Limits the sequences in flight. Use from the event loop only.

    Attributes:
        limit: TGI's ``--max-concurrent-requests``.
        in_flight: sequences in flight.
        draining: new sequences are refused.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_seconds = 0.0

    def enter(self, count: int = 1) -> None:
        """Admit sequences, or raise ApiError: 503 while draining, 429 beyond the limit."""
        if self.draining:
            raise errors.draining(_DRAIN_RETRY_SECONDS)
        if self.in_flight + count > self.limit:
            raise self.overloaded()
        self.in_flight += count
        self._idle.clear()

    def leave(self, seconds: float | None = None) -> None:
        """Release a sequence, after ``seconds`` of work if it was completed."""
        self.in_flight -= 1
        if seconds is not None:
            self._mean_seconds += (seconds - self._mean_seconds) / 16
        if self.in_flight == 0:
            self._idle.set()

    def drain(self) -> None:
        """Refuse new sequences from now on."""
        self.draining = True

    async def idle(self) -> None:
        """Wait until no sequence is in flight."""
        await self._idle.wait()

    def overloaded(self) -> errors.ApiError:
        """A 429 with the mean time until a sequence ends (Little's law), within bounds."""
        estimate = math.ceil(self._mean_seconds / max(self.limit, 1))
        return errors.overloaded(min(max(estimate, 1), _MAX_RETRY_SECONDS))
