"""How long an event loop was held up: the longest time between two turns of a task on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(slots=True)
class LoopGap:
    """Attributes: longest, in seconds, a pause of one millisecond included; turns."""

    longest: float = 0.0
    turns: int = 0


@contextlib.asynccontextmanager
async def loop_gap(pause: float = 0.001) -> AsyncIterator[LoopGap]:
    """Watch the running loop until the end of the block.

    Hosts that are busy hold a loop up as well: bounds belong far above what is measured alone.
    """
    found = LoopGap()

    async def watch() -> None:
        last = time.perf_counter()
        try:
            while True:
                await asyncio.sleep(pause)
                now = time.perf_counter()
                found.longest = max(found.longest, now - last)
                found.turns += 1
                last = now
        except asyncio.CancelledError:  # what is held up at the very end counts, too
            found.longest = max(found.longest, time.perf_counter() - last)
            raise

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.wait({watching})
