"""How long an event loop was held up: the longest time between two turns of a task on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(slots=True)
class LoopGap:
    """What was found between two turns, in seconds; the pause of the task itself included.

    Attributes:
        longest: by the clock, other processes of a busy host included.
        work: processor time of this process, all of its threads together. A long call that keeps
            the interpreter lock counts in whatever thread it runs; other processes do not.
        turns: how many there were.
    """

    longest: float = 0.0
    work: float = 0.0
    turns: int = 0


@contextlib.asynccontextmanager
async def loop_gap(pause: float = 0.001) -> AsyncIterator[LoopGap]:
    """Watch the running loop until the end of the block."""
    found = LoopGap()

    def look(last: tuple[float, float]) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        found.longest = max(found.longest, now[0] - last[0])
        found.work = max(found.work, now[1] - last[1])
        return now

    async def watch() -> None:
        last = time.perf_counter(), time.process_time()
        try:
            while True:
                await asyncio.sleep(pause)
                last = look(last)
                found.turns += 1
        except asyncio.CancelledError:  # what held it up at the very end counts, too
            look(last)
            raise

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.wait({watching})
