"""Who may come in: a bound on requests in flight, and none at all while draining."""

from __future__ import annotations

import asyncio
import math

from tgi_cli.router.http import errors

_DRAIN_RETRY_SECONDS = 5
_MAX_RETRY_SECONDS = 60


class ConcurrencyLimiter:
    """Counts sequences in flight. Used from the event loop alone.

    Attributes:
        limit: TGI's ``--max-concurrent-requests``.
        in_flight: sequences that hold a place.
        draining: no new ones are let in.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_seconds = 0.0

    def enter(self, count: int = 1) -> None:
        """Take places, or raise ApiError: 503 while draining, 429 when there are not enough."""
        if self.draining:
            raise errors.draining(_DRAIN_RETRY_SECONDS)
        if self.in_flight + count > self.limit:
            raise self.overloaded()
        self.in_flight += count
        self._idle.clear()

    def leave(self, seconds: float | None = None) -> None:
        """Give a place back, after ``seconds`` of work that ran to its end."""
        self.in_flight -= 1
        if seconds is not None:
            self._mean_seconds += (seconds - self._mean_seconds) / 16
        if self.in_flight == 0:
            self._idle.set()

    def drain(self) -> None:
        """Let nobody in any more."""
        self.draining = True

    async def idle(self) -> None:
        """Wait until no sequence is in flight."""
        await self._idle.wait()

    def overloaded(self) -> errors.ApiError:
        """A 429 that says when a place comes free on average (Little's law), within bounds."""
        estimate = math.ceil(self._mean_seconds / max(self.limit, 1))
        return errors.overloaded(min(max(estimate, 1), _MAX_RETRY_SECONDS))
