"""Adapters that clients load while the server runs, in several replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from tgi_cli.errors import ShardError
from tgi_cli.router.engine_restart import DynamicAdapters
from tgi_cli.rpc.interface import GONE, Adapter, AdapterError, Adapters, EngineClient


class ReplicaAdapters:
    """Loads adapters into all replicas, with the methods of :class:`DynamicAdapters`.

    A replica that is away gets them when it is back; meanwhile others serve them.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = clients
        self._members = [DynamicAdapters(client) for client in clients]
        for client, member in zip(clients, self._members, strict=True):
            client.on_found(member.restore)

    @property
    def listed(self) -> Adapters:
        """The adapters that any connected replica has, as of its last answer."""
        lists = [client.adapters for client in self._clients if client.connected]
        found: dict[str, Adapter] = {}
        for adapters in lists:
            for adapter in adapters.loaded:
                found.setdefault(adapter.name, adapter)
        return Adapters(min((each.max_loras for each in lists), default=0), tuple(found.values()))

    async def load(self, name: str, source: str, in_place: bool) -> None:
        """Load an adapter into all replicas, or none. Raises as :meth:`DynamicAdapters.load`."""
        results = await self._all(lambda member: member.load(name, source, in_place))
        failures = [each for each in results.values() if isinstance(each, AdapterError)]
        loaded = [member for member, result in results.items() if result is None]
        if failures:
            if not in_place:
                await _each(loaded, lambda member: member.unload(name))
            raise failures[0]
        if not loaded:
            raise next((each for each in results.values() if each), ShardError(GONE, "see its log"))
        for member in self._members:
            if member not in loaded:
                member.expect(name, loaded[0])

    async def unload(self, name: str) -> None:
        """Unload an adapter everywhere. Raises as :meth:`DynamicAdapters.unload`."""
        results = await self._all(lambda member: member.unload(name))
        for member in self._members:
            member.forget(name)
        if None not in results.values():
            raise next((each for each in results.values() if each), ShardError(GONE, "see its log"))

    async def refresh(self) -> None:
        """Have the replicas list what is loaded. Raises ShardError if none answers."""
        results = await self._all(lambda member: member.refresh())
        if None not in results.values():
            raise next((each for each in results.values() if each), ShardError(GONE, "see its log"))

    async def settled(self, name: str) -> None:
        """Wait while no replica has the adapter and one restores it.

        Raises as :meth:`DynamicAdapters.settled`.
        """
        if name not in self.listed.names:
            for member in self._members:
                if member.is_returning(name):
                    await member.settled(name)
                    return

    def restore(self, another: bool) -> None:
        """Each replica restores its own adapters when it is found."""

    def close(self) -> None:
        """Stop restoring."""
        for member in self._members:
            member.close()

    async def _all(
        self, call: Callable[[DynamicAdapters], Awaitable[None]]
    ) -> dict[DynamicAdapters, Exception | None]:
        """Call it for each connected replica at once; its errors by replica, None for success."""
        connected = [
            member
            for client, member in zip(self._clients, self._members, strict=True)
            if client.connected
        ]
        return await _each(connected, call)


async def _each(
    members: Iterable[DynamicAdapters], call: Callable[[DynamicAdapters], Awaitable[None]]
) -> dict[DynamicAdapters, Exception | None]:
    members = list(members)
    results = await asyncio.gather(*(call(member) for member in members), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    return {
        member: result if isinstance(result, Exception) else None
        for member, result in zip(members, results, strict=True)
    }
