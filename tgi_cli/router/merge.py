"""Several generations of one request, as one source of deltas in the order they happen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tgi_cli.router.delta import Delta, DeltaSource
from tgi_cli.router.generation import Generation


class MergedSource:
    """Deltas of all generations; ends when all have ended, fails when one fails."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(generations)

    def __aiter__(self) -> MergedSource:
        return self

    async def __anext__(self) -> Delta:
        if not self._tasks:
            self._tasks = [
                asyncio.ensure_future(self._collect(generation)) for generation in self._generations
            ]
        while self._running:
            item = await self._arrived.get()
            if item is None:
                self._running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                return item
        raise StopAsyncIteration

    def close(self) -> None:
        """Stop all of them. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for generation in self._generations:
            generation.close()

    async def _collect(self, generation: Generation) -> None:
        try:
            async for delta in generation:
                self._arrived.put_nowait(delta)
        except Exception as error:  # passed on whole to whoever iterates
            self._arrived.put_nowait(error)
        else:
            self._arrived.put_nowait(None)


def merge(generations: Sequence[Generation]) -> DeltaSource:
    """One source for any number of generations; a single one is its own, at no cost."""
    return generations[0] if len(generations) == 1 else MergedSource(generations)
