"""Ray's request router for replicas: the choice of ``tgi serve --replicas``, in Ray's hands.

Ray calls it for every request of a handle, offers a request to the replicas in the order that it
returns, and lets replicas reject what exceeds their limit
(https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tgi_cli.ray_serve.messages import ForwardedRequest
from tgi_cli.router.replicas.policy import CacheAwarePolicy

SERVING = "serving"
"""A replica's routing statistic: whether it has a model server at the moment."""
KV_TOKENS = "kv_tokens"
"""Key of a replica's metadata: tokens that its KV cache holds."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request where its prefix is cached, unless that replica is too busy.

    Requests wait in Ray's queue while all replicas are at their limit. Each handle has a router of
    its own, which knows the requests that it has sent.
    """

    queue_len_response_deadline_s = 1.0
    """Ray's default of 0.1 s passes on a busy machine, and the request goes elsewhere."""

    def initialize_state(self, **thresholds: Any) -> None:
        """Ray calls it once, with the arguments of :class:`CacheAwarePolicy`."""
        self._policy: CacheAwarePolicy[str] = CacheAwarePolicy({}, **thresholds)
        self._live: Counter[str] = Counter()
        """Requests in flight by replica."""
        self._routed: Counter[tuple[str, str]] = Counter()
        """Routed requests by replica and Ray's id, since rejected ones end as well."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls it when replicas were added, removed or have sent new statistics."""
        before = {replica_id.unique_id for replica_id in self.curr_replicas}
        now = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in before - set(now):
            self._policy.remove(name)
            del self._live[name]
        for name in set(now) - before:
            self._policy.add(name, int(now[name].replica_metadata.get(KV_TOKENS, 0)))
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray calls it before :meth:`update_replicas` when a call has found a replica dead."""
        if replica_id in self.curr_replicas:
            self._policy.remove(replica_id.unique_id)
            del self._live[replica_id.unique_id]
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which the request should be offered to them."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        # Otherwise Ray asks again at once, and without end, while all are full.
        pending_request.routing_context.should_backoff = True
        request: ForwardedRequest = pending_request.args[0]
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        names = _usable(replicas, request.avoid)
        loads = {name: self._live[name] for name in names}
        first, _ = self._policy.choose(request.key, loads)
        rest = sorted((name for name in names if name != first), key=loads.__getitem__)
        return [[replicas[name]] for name in (first, *rest)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Ray calls it when a replica has accepted a request."""
        if replica_id not in self.curr_replicas:
            return
        name = replica_id.unique_id
        self._policy.sent(name, pending_request.args[0].key)
        self._live[name] += 1
        self._routed[name, pending_request.metadata.internal_request_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls it when a request has ended, or was rejected."""
        name = replica_id.unique_id
        if self._routed[name, internal_request_id] > 1:
            self._routed[name, internal_request_id] -= 1
        elif not self._routed.pop((name, internal_request_id), 0):
            return
        if self._live[name]:  # none if it is gone
            self._live[name] -= 1


def _usable(replicas: dict[str, RunningReplica], avoid: Sequence[str]) -> list[str]:
    """The replicas that may take a request: not those without a model server, if there are others.

    Statistics are a second old; that a replica has refused the request is newer.
    """
    others = [name for name in replicas if name not in avoid]
    serving = [name for name in others if replicas[name].routing_stats.get(SERVING, True)]
    return serving or others or list(replicas)
