"""Whether an engine on the other end of the wire answers, and whether it moves."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio

from tgi_cli.process.heartbeat import StallDetector, allowed_seconds
from tgi_cli.rpc import engine_pb2 as pb

_ANSWER_SECONDS = 2.0
_LOOK_SECONDS = 2.0
"""Between two questions at most."""
_LOOKS = 8
"""Within the timeout."""
_AGAIN_SECONDS = 0.25
"""Between two questions to one that hangs."""
_LATE = 3.0
_SILENT = -1


class EngineWatch:
    """Asks an engine for its progress, as the launcher reads its pulse; both judge it alike.

    Args:
        stub: of the engine's service.
        timeout: seconds for which it may stand still while requests are live; 0: for ever.
    """

    def __init__(self, stub: Any, timeout: float) -> None:
        self._stub = stub
        self._timeout = timeout
        self._mark: int | None = None
        """Its progress while requests are live, or that it said nothing; None: it is idle."""

    async def ask(self) -> pb.HealthResponse | None:
        """What it says of itself; None: it does not answer."""
        try:
            answer: pb.HealthResponse = await self._stub.Health(
                pb.HealthRequest(), timeout=_ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
        return answer

    async def until_hung(self, step_seconds: float) -> float:
        """Return when it hangs: for how many seconds it has stood still.

        Args:
            step_seconds: what its worst step may take; 0: not known.
        """
        if self._timeout <= 0:
            await asyncio.Event().wait()
        allowed = allowed_seconds(self._timeout, step_seconds)
        interval = min(_LOOK_SECONDS, self._timeout / _LOOKS)
        stillness = StallDetector(_LATE * interval + _ANSWER_SECONDS)
        self._mark = None
        while True:
            await asyncio.sleep(interval)
            await self._look()
            if stillness.look(self._mark, time.monotonic()) > allowed:
                return allowed

    async def until_moved(self) -> None:
        """After :meth:`until_hung`: return when it does something, or has nothing to do."""
        mark = self._mark
        while self._mark is not None and self._mark == mark:
            await asyncio.sleep(_AGAIN_SECONDS)
            await self._look()

    async def _look(self) -> None:
        answer = await self.ask()
        if answer is not None:
            self._mark = answer.steps if answer.live_requests else None
        elif self._mark is None:
            self._mark = _SILENT
