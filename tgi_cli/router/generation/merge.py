"""Merges the deltas of several generations of one request in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from tgi_cli.router.generation.deltas import Delta, DeltaSource, Finish, Token
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import unless_disconnected


class MergedSource:
    """Deltas of all generations; ends when all have ended, fails if one fails."""

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
        """Cancel all generations. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for generation in self._generations:
            generation.close()

    async def _collect(self, generation: Generation) -> None:
        try:
            async for delta in generation:
                self._arrived.put_nowait(delta)
        except Exception as error:  # raised again by __anext__
            self._arrived.put_nowait(error)
        else:
            self._arrived.put_nowait(None)


def merge(generations: Sequence[Generation]) -> DeltaSource:
    """One source for any number of generations; a single one is returned as it is."""
    return generations[0] if len(generations) == 1 else MergedSource(generations)


@dataclass(frozen=True, slots=True)
class Whole:
    """A finished generation. ``top_tokens`` is empty unless requested."""

    generation: Generation
    tokens: list[Token]
    top_tokens: list[list[Token]]
    finish: Finish


async def collect(request: Request, generations: Sequence[Generation]) -> list[Whole]:
    """Read all generations of a request to their end, concurrently.

    Raises:
        ApiError: A generation failed; the others are cancelled.
        ClientDisconnected: The client disconnected; all are cancelled.
    """
    source = merge(generations)
    tokens: list[list[Token]] = [[] for _ in generations]
    top_tokens: list[list[list[Token]]] = [[] for _ in generations]
    ends: dict[int, Finish] = {}

    async def read() -> None:
        async for delta in source:
            tokens[delta.index] += delta.tokens
            top_tokens[delta.index] += delta.top_tokens
            if delta.finish is not None:
                ends[delta.index] = delta.finish

    try:
        await unless_disconnected(request, read())
    finally:
        source.close()
    if len(ends) < len(generations):
        raise errors.incomplete()
    return [
        Whole(generation, tokens[index], top_tokens[index], ends[index])
        for index, generation in enumerate(generations)
    ]


def best(wholes: Sequence[Whole], count: int) -> list[Whole]:
    """The ``count`` generations with the highest mean log-probability, best first."""
    return sorted(wholes, key=lambda whole: -whole.generation.mean_logprob)[:count]
