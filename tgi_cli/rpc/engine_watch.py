"""Whether an engine on the other end of the wire answers and makes progress."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import grpc.aio

from tgi_cli.process.heartbeat import StallDetector, allowed_seconds
from tgi_cli.rpc import engine_pb2 as pb

_ANSWER_SECONDS = 2.0
_MAX_INTERVAL = 2.0
"""Seconds between two polls at most."""
_POLLS = 8
"""Polls within the timeout."""
_HUNG_INTERVAL = 0.25
"""Seconds between two polls of an engine that hangs."""
_MAX_DELAY = 3.0
"""Intervals that count at most for a poll that is late."""
_SILENT = -1
_RENEW_SECONDS = 0.5
_VALID_SECONDS = 2.0
"""Ages of an answer from which :meth:`EngineWatch.answers` renews it, and waits for the new one."""


class EngineWatch:
    """Polls an engine's progress, and judges it as the launcher judges its heartbeat.

    Args:
        stub: Stub of the engine's service.
        timeout: Seconds without progress while requests are live, after which it hangs; 0 for
            never.
    """

    def __init__(self, stub: Any, timeout: float) -> None:
        self._stub = stub
        self._timeout = timeout
        self._progress: int | None = None
        """The engine's progress while requests are live, -1 without an answer, or None if idle."""
        self._answered = -math.inf
        """Time of the last answer."""
        self._asking: asyncio.Task[pb.HealthResponse | None] | None = None

    async def answers(self) -> bool:
        """Return whether it answers, or has answered within the last two seconds.

        Any number of callers cost the engine two calls a second, and do not wait for it while its
        answers are recent: a health check is as fast as the router, whatever the CPUs do.
        """
        age = time.monotonic() - self._answered
        if age < _RENEW_SECONDS:
            return True
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self.ask(), name="health")
        if age < _VALID_SECONDS:
            return True
        return await asyncio.shield(self._asking) is not None

    def forget(self) -> None:
        """Ignore earlier answers: the session has ended."""
        self._answered = -math.inf

    def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()

    async def ask(self) -> pb.HealthResponse | None:
        """Return its health, or None if it does not answer."""
        try:
            answer: pb.HealthResponse = await self._stub.Health(
                pb.HealthRequest(), timeout=_ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
        self._answered = time.monotonic()
        return answer

    async def until_hung(self, step_seconds: float) -> float:
        """Return once it hangs, with the seconds for which it has made no progress.

        Args:
            step_seconds: Longest time that a step may take; 0 if unknown.
        """
        if self._timeout <= 0:
            await asyncio.Event().wait()
        allowed = allowed_seconds(self._timeout, step_seconds)
        interval = min(_MAX_INTERVAL, self._timeout / _POLLS)
        detector = StallDetector(_MAX_DELAY * interval + _ANSWER_SECONDS)
        self._progress = None
        while True:
            await asyncio.sleep(interval)
            await self._poll()
            if detector.poll(self._progress, time.monotonic()) > allowed:
                return allowed

    async def until_moved(self) -> None:
        """After :meth:`until_hung`, return once it makes progress or is idle."""
        progress = self._progress
        while self._progress is not None and self._progress == progress:
            await asyncio.sleep(_HUNG_INTERVAL)
            await self._poll()

    async def _poll(self) -> None:
        answer = await self.ask()
        if answer is not None:
            self._progress = answer.steps if answer.live_requests else None
        elif self._progress is None:
            self._progress = _SILENT
