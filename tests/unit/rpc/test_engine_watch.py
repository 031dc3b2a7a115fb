"""Health checks must cost the engine a bounded number of calls, and notice that it stops."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc import engine_watch
from tgi_cli.rpc.engine_watch import EngineWatch


class Engine:
    """Answers calls of Health, fails them, or lets them wait."""

    def __init__(self) -> None:
        self.calls = 0
        self.dead = False
        self.slow = asyncio.Event()
        self.slow.set()

    async def Health(self, request: pb.HealthRequest, timeout: float) -> pb.HealthResponse:  # noqa: ASYNC109 (gRPC's)
        self.calls += 1
        await self.slow.wait()
        if self.dead:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
            )
        return pb.HealthResponse()


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]

    def move(seconds: float) -> None:
        now[0] += seconds

    clock: Any = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(engine_watch, "time", clock)
    return move


async def test_checks_within_half_a_second_ask_once(advance: Callable[[float], None]) -> None:
    engine = Engine()
    watch = EngineWatch(engine, 0)
    for _ in range(40):
        assert await watch.answers()
        advance(0.01)
    assert engine.calls == 1


async def test_concurrent_checks_share_a_call() -> None:
    engine = Engine()
    engine.slow.clear()
    watch = EngineWatch(engine, 0)
    checks = [asyncio.create_task(watch.answers()) for _ in range(50)]
    await asyncio.sleep(0)
    engine.slow.set()
    assert await asyncio.gather(*checks) == [True] * 50
    assert engine.calls == 1


async def test_a_check_does_not_wait_while_the_last_answer_is_recent(
    advance: Callable[[float], None],
) -> None:
    engine = Engine()
    watch = EngineWatch(engine, 0)
    await watch.answers()
    engine.slow.clear()
    advance(1.0)
    assert await asyncio.wait_for(watch.answers(), 60)
    assert await asyncio.wait_for(watch.answers(), 60)
    await asyncio.sleep(0)
    assert engine.calls == 2
    watch.close()


async def test_a_dead_engine_is_noticed_within_two_seconds(
    advance: Callable[[float], None],
) -> None:
    engine = Engine()
    watch = EngineWatch(engine, 0)
    assert await watch.answers()
    engine.dead = True
    advance(1.0)
    assert await watch.answers()
    await asyncio.sleep(0)  # the renewal fails
    advance(1.0)
    assert not await watch.answers()
    engine.dead = False
    assert await watch.answers()


async def test_answers_of_an_earlier_session_do_not_count() -> None:
    engine = Engine()
    watch = EngineWatch(engine, 0)
    assert await watch.answers()
    watch.forget()
    engine.dead = True
    assert not await watch.answers()


async def test_a_cancelled_check_does_not_cancel_the_call_of_others() -> None:
    engine = Engine()
    engine.slow.clear()
    watch = EngineWatch(engine, 0)
    first, second = (asyncio.create_task(watch.answers()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    engine.slow.set()
    assert await second
    assert engine.calls == 1
