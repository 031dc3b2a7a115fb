"""Several engines with the same model as one :class:`tgi_cli.rpc.interface.EngineClient`.

A request goes to one engine, and the pool is not involved in its tokens: its stream is that of the
engine's own client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from tgi_cli.engine.common_limits import common_limits
from tgi_cli.engine.messages import EngineInfo, GenerationRequest
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.errors import ShardError
from tgi_cli.router.replicas.adapters import ReplicaAdapters
from tgi_cli.router.replicas.policy import CacheAwarePolicy, RoutingKey, RoutingReason
from tgi_cli.router.replicas.prefix_index import prefix_hashes
from tgi_cli.rpc.interface import GONE, Adapters, EngineClient
from tgi_cli.rpc.resubmission import TakeOver
from tgi_cli.rpc.streams import RequestStream

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 0.5
"""Longest wait of a health check for a replica while others have answered."""


class ReplicaClient(EngineClient, Protocol):
    """What :class:`tgi_cli.rpc.client.GrpcEngineClient` offers a pool beyond its interface."""

    @property
    def accepting(self) -> bool: ...

    @property
    def num_live(self) -> int: ...

    def is_live(self, request_id: int) -> bool: ...

    def on_refused(self, take_over: TakeOver) -> None: ...

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> RequestStream: ...

    def adopt(self, stream: RequestStream, request: GenerationRequest, adapter: str) -> None: ...

    async def close(self) -> None: ...


class EnginePool:
    """Divides requests among replicas. Use from the event loop only.

    Args:
        clients: Clients of the replicas, by their numbers, all connected; closed with the pool.
        policy: Chooses among them.

    Attributes:
        replicas: The clients.
        dynamic: The adapters that clients load.
        routed: Number of requests by replica and reason.
    """

    def __init__(self, clients: Sequence[ReplicaClient], policy: CacheAwarePolicy[int]) -> None:
        self.replicas = tuple(clients)
        self.routed: Counter[tuple[int, RoutingReason]] = Counter()
        self._policy = policy
        self._request_ids = itertools.count(1)
        self._callbacks: list[Callable[[bool], None]] = []
        self._info = common_limits([client.info for client in clients])
        for replica, client in enumerate(self.replicas):
            client.on_found(partial(self._found, replica))
            client.on_refused(partial(self._submit_elsewhere, replica))
        self.dynamic = ReplicaAdapters(self.replicas)

    @property
    def info(self) -> EngineInfo:
        """The model, with the limits that all replicas have."""
        return self._info

    @property
    def connected(self) -> bool:
        """Whether any replica takes requests."""
        return any(client.accepting for client in self.replicas)

    def on_found(self, callback: Callable[[bool], None]) -> None:
        """As :meth:`EngineClient.on_found`, whenever one of the replicas is found."""
        self._callbacks.append(callback)

    def expect_loss(self) -> None:
        """As :meth:`EngineClient.expect_loss`, of all replicas."""
        for client in self.replicas:
            client.expect_loss()

    async def healthy(self) -> bool:
        """Whether any replica can answer requests."""
        return any(await self.health())

    async def health(self) -> list[bool]:
        """For each replica, whether it can answer requests."""
        asking = [asyncio.ensure_future(client.healthy()) for client in self.replicas]
        try:
            await asyncio.wait(asking, timeout=_HEALTH_SECONDS)
            if not any(each.done() and each.result() for each in asking):
                await asyncio.wait(asking)
            return [
                client.accepting and each.done() and each.result()
                for client, each in zip(self.replicas, asking, strict=True)
            ]
        finally:
            for each in asking:
                each.cancel()

    async def metrics(self) -> EngineMetrics:
        """The sum over all replicas."""
        return EngineMetrics.total(
            await asyncio.gather(*(client.metrics() for client in self.replicas))
        )

    # ------------------------------------------------------------------ requests

    def next_request_id(self) -> int:
        """An id that no live request of any replica has."""
        return next(self._request_ids)

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> RequestStream:
        """As :meth:`EngineClient.submit`, to the replica that the policy chooses.

        A further sample of a prompt goes to the replica of the first. Costs 50 us for a prompt of
        4,096 tokens (tests/benchmarks/replica_routing.py).
        """
        client = self.replicas[self._replica_for(request, adapter, session)]
        return client.submit(_forked_there(request, client), adapter)

    def _replica_for(self, request: GenerationRequest, adapter: str, session: str = "") -> int:
        """The replica for a request. Raises ShardError."""
        if request.fork_of is not None:
            for replica, client in enumerate(self.replicas):
                if client.accepting and client.is_live(request.fork_of):
                    return replica
        return self._choose(request, adapter, session)

    def _choose(self, request: GenerationRequest, adapter: str, session: str) -> int:
        """The replica for a request, which it is counted for. Raises ShardError."""
        clients = self.replicas
        loads = {
            replica: client.num_live
            for replica, client in enumerate(clients)
            if client.accepting and (not adapter or adapter in client.adapters.names)
        }
        if not loads:
            raise ShardError(GONE, "see its log")
        key = RoutingKey(
            prefix_hashes(request, adapter),
            len(request.prompt_ids),
            hash((request.tenant, session)) if session else None,
        )
        replica, reason = self._policy.choose(key, loads)
        self._policy.sent(replica, key)
        self.routed[replica, reason] += 1
        return replica

    def _submit_elsewhere(
        self, refused_by: int, stream: RequestStream, request: GenerationRequest, adapter: str
    ) -> bool:
        """Submit a request that a draining replica has refused; returns whether one took it."""
        try:
            replica = self._replica_for(request, adapter)
            client = self.replicas[replica]
            client.adopt(stream, _forked_there(request, client), adapter)
        except ShardError:
            return False
        logger.debug("a request went to replica %d, as %d drains", replica, refused_by)
        return True

    def _found(self, replica: int, another: bool) -> None:
        if another:
            info = self.replicas[replica].info
            self._policy.reset(replica, info.max_batch_total_tokens)
            self._info = common_limits([client.info for client in self.replicas])
        for callback in self._callbacks:
            callback(another)

    # ------------------------------------------------------------------ adapters

    @property
    def adapters(self) -> Adapters:
        """The adapters that any replica has; requests go to one that has theirs."""
        return self.dynamic.listed

    async def list_adapters(self) -> Adapters:
        """As :meth:`EngineClient.list_adapters`, of all replicas."""
        await self.dynamic.refresh()
        return self.adapters

    async def load_adapter(self, name: str, source: str, in_place: bool = False) -> Adapters:
        """As :meth:`EngineClient.load_adapter`, into all replicas."""
        await self.dynamic.load(name, source, in_place)
        return self.adapters

    async def unload_adapter(self, name: str) -> Adapters:
        """As :meth:`EngineClient.unload_adapter`, from all replicas."""
        await self.dynamic.unload(name)
        return self.adapters

    async def close(self) -> None:
        """Close all clients."""
        self.dynamic.close()
        await asyncio.gather(*(client.close() for client in self.replicas))


def _forked_there(request: GenerationRequest, client: ReplicaClient) -> GenerationRequest:
    """A further sample as a request of its own, unless its first sample is at the same replica."""
    if request.fork_of is None or client.is_live(request.fork_of):
        return request
    return replace(request, fork_of=None)


def replicas_of(client: EngineClient) -> Sequence[EngineClient]:
    """The replicas of a pool, or the one client that there is."""
    return client.replicas if isinstance(client, EnginePool) else (client,)
