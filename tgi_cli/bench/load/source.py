"""The requests in their order, and whose turn is next in conversations."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from tgi_cli.bench.load.frames import Item
from tgi_cli.bench.load.sender import Talk


@dataclass
class Turns:
    """One conversation: what was said, and the turns that wait for their answer."""

    talk: Talk = field(default_factory=Talk)
    waiting: deque[Item] = field(default_factory=deque)
    running: bool = False


class Source:
    """Takes requests in as they are made elsewhere, and gives them out.

    A request of a conversation that runs is handed over to whoever runs it.
    """

    def __init__(self, ahead: int = 512) -> None:
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue(ahead)
        self._lock = asyncio.Lock()
        self._next: Item | None = None
        self._over = False
        self._conversations: dict[int, Turns] = {}

    async def put(self, item: Item | None) -> None:
        """One more; None: that were all. Waits while many are ahead of need."""
        await self._queue.put(item)

    async def take(self) -> tuple[Item, Turns | None] | None:
        """The next request to begin, with its conversation; None: there is no more."""
        async with self._lock:
            await self._fill()
            item, self._next = self._next, None
            if item is None:
                return None
            number = item.request.conversation
            if number is None:
                return item, None
            turns = self._conversations.setdefault(number, Turns())
            turns.running = True
            return item, turns

    async def turn(self, turns: Turns) -> Item | None:
        """The next turn of a conversation that runs; None: it has ended, for now."""
        if not turns.waiting and not turns.talk.failed:
            async with self._lock:
                await self._fill(turns)
        if turns.waiting and not turns.talk.failed:
            return turns.waiting.popleft()
        turns.running = False
        return None

    async def _fill(self, wanted: Turns | None = None) -> None:
        """Hand turns over, until one came for ``wanted`` or the next request begins something."""
        while self._next is None and not self._over and not (wanted and wanted.waiting):
            item = await self._queue.get()
            if item is None:
                self._over = True
                return
            number = item.request.conversation
            turns = None if number is None else self._conversations.get(number)
            if turns is None or not (turns.running or turns.talk.failed):
                self._next = item
            elif turns.running and not turns.talk.failed:
                turns.waiting.append(item)
            # A turn behind one that failed has nothing to answer; it is left out.
