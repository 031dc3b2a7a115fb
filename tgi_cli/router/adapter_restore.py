"""Adapters that were loaded over HTTP: known here, so that another engine can have them too."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from tgi_cli.errors import ShardError
from tgi_cli.router.http import errors
from tgi_cli.rpc.interface import GONE, AdapterError, AdapterFault, EngineClient

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0
"""For which a request waits for its adapter; then its client is told to come again."""
_PAUSE_SECONDS = 1.0
"""Before an engine that could not load one now is asked again."""
_TRIES = 3
"""Of an engine that is there and does not answer."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Where an adapter is: its folder on the engine's machine, and what the client had said."""

    path: str
    source: str


class DynamicAdapters:
    """What was loaded by way of this router and not unloaded since. For the event loop alone.

    Another router may have unloaded one, or put another in its place: what the engine lists
    tells, and the adapter is not this router's any more.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._kept: dict[str, _Kept] = {}
        self._returning: dict[str, asyncio.Event] = {}
        """Those that the engine does not have yet; set when there is news of one."""
        self._restoring: asyncio.Task[None] | None = None

    async def load(self, name: str, source: str, in_place: bool) -> None:
        """Load one and keep it. As :meth:`EngineClient.load_adapter`; ApiError: :meth:`settled`."""
        await self.settled(name)
        await self._load(name, source, source, in_place)

    async def unload(self, name: str) -> None:
        """Unload one for good. As :meth:`EngineClient.unload_adapter`, or ApiError as above."""
        await self.settled(name)
        try:
            await self._client.unload_adapter(name)
        except AdapterError as error:
            if error.fault is AdapterFault.UNKNOWN:
                self._kept.pop(name, None)
            raise
        self._kept.pop(name, None)

    async def ask(self) -> None:
        """Have the client ask what is loaded. Raises ShardError."""
        before = {name: one for name, one in self._kept.items() if name not in self._returning}
        there = {one.name: one.path for one in (await self._client.list_adapters()).loaded}
        for name, kept in before.items():
            changed = there.get(name) != kept.path and name not in self._returning
            if changed and self._kept.get(name) is kept:
                del self._kept[name]

    async def settled(self, name: str) -> None:
        """Wait while it is being loaded again. Raises ApiError, 503, when that takes too long."""
        returning = self._returning.get(name)
        if returning is None:
            return
        if self._client.connected:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await returning.wait()
            if name not in self._returning:
                return
        still = f"the adapter {name!r} is still being loaded again"
        raise errors.engine_gone(still if self._client.connected else GONE)

    def restore(self, another: bool) -> None:
        """Have the engine load what it lacks; :meth:`settled` waits for that from now on.

        Args:
            another: it is not the one that was there. From that one, lost and found while it
                was being told, only what it has not been told yet is wanted.
        """
        self.close()
        there = {one.name: one.path for one in self._client.adapters.loaded}
        lacking = {
            name
            for name, kept in self._kept.items()
            if (another or name in self._returning) and there.get(name) != kept.path
        }
        for name in set(self._returning) - lacking:
            self._returning.pop(name).set()
        for name in lacking:
            self._returning.setdefault(name, asyncio.Event())
        if lacking:
            self._restoring = asyncio.create_task(self._restore(), name="adapters")

    def close(self) -> None:
        """Restore nothing any more."""
        if self._restoring is not None:
            self._restoring.cancel()

    async def _restore(self) -> None:
        for name, kept in list(self._kept.items()):
            if name not in self._returning:
                continue
            try:
                await self._load_again(name, kept)
                logger.info("adapter %s: loaded again", name)
            except (AdapterError, ShardError) as error:
                if isinstance(error, ShardError) and not self._client.connected:
                    self._pause()
                    return  # until it is found, or another one
                del self._kept[name]
                if isinstance(error, AdapterError) and error.fault is AdapterFault.TAKEN:
                    logger.info("adapter %s: somebody else has loaded one of this name", name)
                    with suppress(ShardError):
                        await self._client.list_adapters()
                else:
                    logger.warning("adapter %s: dropped, cannot be loaded again: %s", name, error)
            self._returning.pop(name).set()

    def _pause(self) -> None:
        """The engine is lost: whoever waits for it here is told."""
        for name, returning in self._returning.items():
            returning.set()
            self._returning[name] = asyncio.Event()

    async def _load_again(self, name: str, kept: _Kept) -> None:
        """From its folder, or from where that came if it is gone. AdapterError, ShardError."""
        sources = [kept.source] if kept.source != kept.path else []
        path, tries = kept.path, 1
        # One of the command line's may have the name, which this one had taken.
        in_place = name in self._client.adapters.names
        while True:
            try:
                return await self._load(name, path, kept.source, in_place)
            except AdapterError as error:
                if error.fault is AdapterFault.UNKNOWN and sources:
                    path = sources.pop()
                elif error.fault is AdapterFault.BUSY:
                    await asyncio.sleep(_PAUSE_SECONDS)
                else:
                    raise
            except ShardError:
                if tries == _TRIES:
                    raise
                tries += 1
                await asyncio.sleep(_PAUSE_SECONDS)
                if not self._client.connected:
                    raise

    async def _load(self, name: str, where: str, source: str, in_place: bool) -> None:
        answer = await self._client.load_adapter(name, where, in_place)
        for adapter in answer.loaded:
            if adapter.name == name:
                self._kept[name] = _Kept(adapter.path, source)
