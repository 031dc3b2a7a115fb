"""The order in which Ray offers a request to replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from tgi_cli.ray_serve.messages import ForwardedRequest
from tgi_cli.ray_serve.prefix_router import KV_TOKENS, SERVING, PrefixRouter
from tgi_cli.router.replicas.policy import RoutingKey

DEPLOYMENT = DeploymentID("engine", "tgi")
PREFIX = RoutingKey((1, 2, 3), 200)
NEW = RoutingKey((7, 8, 9), 200)


def replica(name: str, **stats: Any) -> Any:
    async def get_queue_len(*, deadline_s: float) -> int:
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT),
        routing_stats=stats,
        replica_metadata={KV_TOKENS: 64_000},
        max_ongoing_requests=8,
        get_queue_len=get_queue_len,
    )


def pending(key: RoutingKey, name: str = "r", avoid: tuple[str, ...] = ()) -> Any:
    request = ForwardedRequest(
        method="POST",
        path="/generate",
        query=b"",
        headers=[],
        body=b"",
        client=None,
        key=key,
        avoid=avoid,
    )
    return SimpleNamespace(
        args=[request],
        routing_context=SimpleNamespace(should_backoff=False),
        metadata=SimpleNamespace(internal_request_id=name),
    )


@pytest.fixture
async def router() -> PrefixRouter:
    router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.UNKNOWN)
    router.initialize_state(
        cache_threshold=0.25, balance_abs_threshold=2, balance_rel_threshold=1.5
    )
    router.update_replicas([replica("a"), replica("b"), replica("c")])
    return router


async def order(router: PrefixRouter, request: Any) -> list[str]:
    candidates = list(router.curr_replicas.values())
    ranks = await router.choose_replicas(candidates, request)
    assert all(len(rank) == 1 for rank in ranks)
    assert request.routing_context.should_backoff
    return [rank[0].replica_id.unique_id for rank in ranks]


def route(router: PrefixRouter, request: Any, name: str) -> None:
    router.on_request_routed(request, ReplicaID(name, DEPLOYMENT), None)


def complete(router: PrefixRouter, request: Any, name: str) -> None:
    router.on_request_completed(ReplicaID(name, DEPLOYMENT), request.metadata.internal_request_id)


async def test_a_prefix_stays_where_it_was(router: PrefixRouter) -> None:
    first = pending(PREFIX)
    route(router, first, "b")
    complete(router, first, "b")
    assert (await order(router, pending(PREFIX)))[0] == "b"
    assert sorted(await order(router, pending(NEW))) == ["a", "b", "c"]


async def test_others_go_to_the_least_busy_one(router: PrefixRouter) -> None:
    route(router, pending(PREFIX, "1"), "a")
    route(router, pending(PREFIX, "2"), "a")
    route(router, pending(PREFIX, "3"), "b")
    assert await order(router, pending(NEW)) == ["c", "b", "a"]


async def test_a_busy_replica_loses_its_prefix_to_others(router: PrefixRouter) -> None:
    requests = [pending(PREFIX, str(number)) for number in range(3)]
    for request in requests:
        route(router, request, "a")
    assert (await order(router, pending(PREFIX)))[0] in "bc"
    complete(router, requests[0], "a")
    assert (await order(router, pending(PREFIX)))[0] == "a"


async def test_rejected_requests_do_not_count_as_ended(router: PrefixRouter) -> None:
    route(router, pending(PREFIX, "1"), "a")
    complete(router, pending(PREFIX, "2"), "a")
    complete(router, pending(PREFIX, "1"), "b")
    assert (await order(router, pending(NEW)))[-1] == "a"


async def test_replicas_without_a_model_server_are_left_out(router: PrefixRouter) -> None:
    router.update_replicas([replica("a", **{SERVING: False}), replica("b"), replica("c")])
    assert set(await order(router, pending(NEW))) == {"b", "c"}
    assert await order(router, pending(NEW, avoid=("b",))) == ["c"]
    # It is chosen if there is no other one.
    assert set(await order(router, pending(NEW, avoid=("b", "c")))) == {"a"}
    assert set(await order(router, pending(NEW, avoid=("a", "b", "c")))) == {"a", "b", "c"}


async def test_replicas_come_and_go(router: PrefixRouter) -> None:
    request = pending(PREFIX)
    route(router, request, "b")
    router.on_replica_actor_died(ReplicaID("b", DEPLOYMENT))
    complete(router, request, "b")
    assert set(await order(router, pending(PREFIX))) == {"a", "c"}
    router.update_replicas([replica("a"), replica("d")])
    assert set(await order(router, pending(PREFIX))) == {"a", "d"}
    route(router, request, "gone")
    assert set(await order(router, pending(PREFIX))) == {"a", "d"}
