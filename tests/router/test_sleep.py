"""An engine that sleeps: requests wait for it and wake it once, and clients may ask for both."""

from __future__ import annotations

import asyncio
import os
import time
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
import uvloop

from tests.router.fakes import FakeEngine
from tgi_cli.process.control_channel import Command, ControlChannel, Outcome, OutcomeMessage
from tgi_cli.router.engine_sleep import EnginePhase, EngineSleep
from tgi_cli.router.launcher_connection import LauncherConnection
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.interface import Adapter, AdapterError, Adapters

MAX_SECONDS = 60.0
BODY: dict[str, Any] = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}


class FakeLauncher:
    """Stops and starts the scripted engine.

    Attributes:
        commands: What the router has asked for.
        gate: Set when a start may succeed.
        causes: Why the next starts fail.
    """

    def __init__(self, engine: FakeEngine, sleep: EngineSleep) -> None:
        self.commands: list[Command] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.causes: list[str] = []
        self.refusal = ""
        self._engine = engine
        self._sleep = sleep
        self._tasks: list[asyncio.Task[None]] = []

    def send(self, command: Command) -> None:
        self.commands.append(command)
        self._tasks.append(asyncio.create_task(self._answer(command)))

    async def _answer(self, command: Command) -> None:
        if self.refusal:
            self._sleep.on_outcome(OutcomeMessage(Outcome.REFUSED, self.refusal))
        elif command is Command.SLEEP:
            self._engine.connected = False
            self._sleep.on_outcome(OutcomeMessage(Outcome.ASLEEP))
        else:
            await self.gate.wait()
            if self.causes:
                self._sleep.on_outcome(OutcomeMessage(Outcome.ASLEEP, self.causes.pop(0)))
            else:
                self._engine.restart()


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"control_fd": 99, "enable_sleep_mode": True, "api_key": "secret"}


@pytest.fixture(autouse=True)
def key(client: httpx.AsyncClient) -> None:
    client.headers["authorization"] = "Bearer secret"


@pytest.fixture
async def launcher(state: RouterState, engine: FakeEngine) -> FakeLauncher:
    launcher = FakeLauncher(engine, state.sleep)
    state.sleep.attach(launcher)
    return launcher


async def status(client: httpx.AsyncClient, body: dict[str, Any] = BODY) -> int:
    async with asyncio.timeout(MAX_SECONDS):
        return (await client.post("/generate", json=body)).status_code


async def until(condition: Any) -> None:
    async with asyncio.timeout(MAX_SECONDS):
        while not condition():  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0)


async def put_to_sleep(client: httpx.AsyncClient, mode: str = "wait") -> None:
    answer = await client.post("/sleep", params={"level": 1, "mode": mode})
    assert answer.status_code == 200, answer.text


async def sleeping(client: httpx.AsyncClient) -> bool:
    found: bool = (await client.get("/is_sleeping")).json()["is_sleeping"]
    return found


async def shown(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[-1])


async def test_a_request_wakes_the_engine_and_is_answered(
    client: httpx.AsyncClient, engine: FakeEngine, launcher: FakeLauncher
) -> None:
    assert await status(client) == 200
    await put_to_sleep(client)
    assert await sleeping(client)
    assert await shown(client, "tgi_engine_asleep") == 1
    health = await client.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "asleep"})
    for path in ("/info", "/v1/models", "/v2/health/ready"):
        assert (await client.get(path)).status_code == 200
    assert launcher.commands == [Command.SLEEP], "to look at it does not wake it"
    assert await status(client) == 200
    assert launcher.commands == [Command.SLEEP, Command.WAKE]
    assert not await sleeping(client)
    assert (await client.get("/health")).content == b""
    assert await shown(client, "tgi_engine_asleep") == 0
    assert await shown(client, 'tgi_engine_wakes_total{result="success"}') == 1
    assert await shown(client, "tgi_engine_last_wake_seconds") > 0


async def test_many_requests_wake_it_once(
    client: httpx.AsyncClient, engine: FakeEngine, launcher: FakeLauncher, state: RouterState
) -> None:
    await put_to_sleep(client)
    launcher.gate.clear()
    waiting = [asyncio.create_task(status(client)) for _ in range(30)]
    await until(lambda: state.admission.parked == 30)
    await until(lambda: state.sleep.phase is EnginePhase.WAKING)
    assert state.admission.active == 0
    launcher.gate.set()
    assert await asyncio.gather(*waiting) == [200] * 30
    assert launcher.commands == [Command.SLEEP, Command.WAKE]
    assert state.admission.in_flight == state.admission.parked == 0


async def test_an_invalid_request_wakes_nothing(
    client: httpx.AsyncClient, launcher: FakeLauncher
) -> None:
    await put_to_sleep(client)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 5000}}
    assert await status(client, body) == 422
    assert launcher.commands == [Command.SLEEP]


async def test_a_failed_wake_ends_those_that_wait_with_its_cause(
    client: httpx.AsyncClient, engine: FakeEngine, launcher: FakeLauncher, state: RouterState
) -> None:
    await put_to_sleep(client)
    launcher.causes = ["the model needs 9 GiB, and 1 GiB is free"]
    launcher.gate.clear()
    waiting = [asyncio.create_task(client.post("/generate", json=BODY)) for _ in range(3)]
    await until(lambda: state.admission.parked == 3)
    launcher.gate.set()
    for answer in await asyncio.gather(*waiting):
        assert answer.status_code == 503
        assert "9 GiB" in answer.json()["error"]
        assert int(answer.headers["retry-after"]) > 0
    assert await sleeping(client)
    assert await shown(client, 'tgi_engine_wakes_total{result="failure"}') == 1
    assert await status(client) == 200, "the next one tries again"


async def test_the_deadline_of_a_request_bounds_its_wait(
    client: httpx.AsyncClient, launcher: FakeLauncher, state: RouterState
) -> None:
    await put_to_sleep(client)
    launcher.gate.clear()
    late = await client.post("/generate", json=BODY, headers={"x-request-timeout": "0.05"})
    assert late.status_code == 504
    assert state.admission.in_flight == state.admission.parked == 0
    launcher.gate.set()
    assert await status(client) == 200
    assert launcher.commands == [Command.SLEEP, Command.WAKE]


async def test_requests_may_finish_before_it_sleeps_and_new_ones_wait(
    client: httpx.AsyncClient, engine: FakeEngine, launcher: FakeLauncher, state: RouterState
) -> None:
    gate = engine.gate = asyncio.Semaphore(0)
    running = asyncio.create_task(status(client))
    await until(lambda: engine.requests)
    going = asyncio.create_task(put_to_sleep(client))
    await until(lambda: not state.sleep.awake)
    late = asyncio.create_task(status(client))
    await until(lambda: state.admission.parked)
    assert not launcher.commands, "one is running"
    for _ in range(10):
        gate.release()
    assert await running == 200
    await going
    assert await late == 200
    assert launcher.commands == [Command.SLEEP, Command.WAKE]


async def test_requests_may_be_aborted(
    client: httpx.AsyncClient, engine: FakeEngine, launcher: FakeLauncher
) -> None:
    engine.gate = asyncio.Semaphore(0)
    running = asyncio.create_task(client.post("/generate", json=BODY))
    await until(lambda: engine.requests)
    await put_to_sleep(client, "abort")
    answer = await running
    assert answer.status_code == 424
    assert "going to sleep" in answer.json()["error"]
    assert await sleeping(client)


async def test_sleep_that_the_launcher_refuses_leaves_it_awake(
    client: httpx.AsyncClient, launcher: FakeLauncher
) -> None:
    launcher.refusal = "the model server does not serve at the moment"
    answer = await client.post("/sleep")
    assert answer.status_code == 503
    assert "does not serve" in answer.json()["error"]
    assert not await sleeping(client)
    assert await status(client) == 200


async def test_an_engine_that_is_gone_cannot_sleep(
    client: httpx.AsyncClient, engine: FakeEngine, launcher: FakeLauncher
) -> None:
    engine.connected = False
    assert (await client.post("/sleep")).status_code == 503
    assert await status(client) == 503, "a crash is no sleep"
    assert not launcher.commands


async def test_wake_up_without_a_request(client: httpx.AsyncClient, launcher: FakeLauncher) -> None:
    await put_to_sleep(client)
    query = [("tags", "weights"), ("tags", "kv_cache")]
    for _ in range(2):
        assert (await client.post("/wake_up", params=query)).status_code == 200
        assert not await sleeping(client)
    assert launcher.commands == [Command.SLEEP, Command.WAKE]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/sleep", {"level": "0"}),
        ("/sleep", {"mode": "keep"}),
        ("/wake_up", {"tags": "optimizer"}),
    ],
)
async def test_what_cannot_be_done_is_refused(
    client: httpx.AsyncClient, launcher: FakeLauncher, path: str, query: dict[str, str]
) -> None:
    answer = await client.post(path, params=query)
    assert answer.status_code == 400
    assert next(iter(query)) in answer.json()["error"]


async def test_sleep_needs_a_key(client: httpx.AsyncClient, launcher: FakeLauncher) -> None:
    del client.headers["authorization"]
    for path in ("/sleep", "/wake_up"):
        assert (await client.post(path)).status_code == 401
    assert (await client.get("/is_sleeping")).status_code == 401
    assert not launcher.commands


async def test_dynamic_adapters_come_back(
    client: httpx.AsyncClient, engine: FakeEngine, launcher: FakeLauncher
) -> None:
    engine.adapters = engine.there = Adapters(4)
    body = {"lora_name": "one", "lora_path": "/one"}
    assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    await put_to_sleep(client)
    named = {"inputs": "hello", "parameters": {"max_new_tokens": 2, "adapter_id": "one"}}
    assert await status(client, named) == 200
    assert engine.there.loaded == (Adapter("one", "/one"),)
    assert engine.used[-1] == "one"
    await put_to_sleep(client)
    engine.faults["two"] = [AdapterError("no such folder")]
    body = {"lora_name": "two", "lora_path": "/two"}
    assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 400
    assert not await sleeping(client), "to load one wakes it"


class TestIdle:
    async def test_it_sleeps_after_a_time_without_requests(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        launcher = FakeLauncher(engine, state.sleep)
        engine.gate = asyncio.Semaphore(0)
        running = asyncio.create_task(status(client))
        await until(lambda: engine.requests)
        state.sleep.attach(launcher, idle_seconds=0.2)
        await asyncio.sleep(0.5)
        assert state.sleep.awake, "a request is running"
        began = time.monotonic()
        engine.gate.release()
        engine.gate.release()
        engine.gate.release()
        assert await running == 200
        await until(lambda: state.sleep.phase is EnginePhase.ASLEEP)
        assert time.monotonic() - began >= 0.2
        engine.gate = None
        assert await status(client) == 200
        await until(lambda: state.sleep.phase is EnginePhase.ASLEEP)
        assert launcher.commands == [Command.SLEEP, Command.WAKE, Command.SLEEP]
        state.sleep.close()

    async def test_a_lost_engine_is_not_put_to_sleep(
        self, engine: FakeEngine, state: RouterState
    ) -> None:
        launcher = FakeLauncher(engine, state.sleep)
        engine.connected = False
        state.sleep.attach(launcher, idle_seconds=0.01)
        await asyncio.sleep(0.2)
        assert not launcher.commands
        engine.restart()
        await until(lambda: state.sleep.phase is EnginePhase.ASLEEP)
        state.sleep.close()


class TestShutDown:
    async def test_those_that_wait_end_with_the_cause(
        self, client: httpx.AsyncClient, launcher: FakeLauncher, state: RouterState
    ) -> None:
        await put_to_sleep(client)
        launcher.gate.clear()
        waiting = asyncio.create_task(client.post("/generate", json=BODY))
        await until(lambda: state.admission.parked)
        state.generator.abort("the server is shutting down")
        answer = await waiting
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]

    async def test_a_death_that_the_launcher_sees_first_is_sleep(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        launcher: FakeLauncher,
        state: RouterState,
    ) -> None:
        """It served for a moment, and the launcher took its end for that of a failed start."""
        engine.connected = False
        state.sleep.on_outcome(OutcomeMessage(Outcome.ASLEEP, "the model server was killed"))
        assert await status(client) == 200
        assert launcher.commands == [Command.WAKE]


def test_the_channel_to_the_launcher() -> None:
    """On the event loop of a router's process."""

    async def talk() -> None:
        channel, commands, outcomes = ControlChannel(), SimpleQueue[Command](), []
        connection = await LauncherConnection.open(os.dup(channel.router_fd), outcomes.append)
        channel.close_router_fd()
        channel.listen(commands.put)
        connection.send(Command.SLEEP)
        assert await asyncio.to_thread(commands.get, timeout=MAX_SECONDS) is Command.SLEEP
        channel.reply(Outcome.ASLEEP)
        channel.reply(Outcome.REFUSED, "why")
        await until(lambda: len(outcomes) == 2)
        assert outcomes[1] == OutcomeMessage(Outcome.REFUSED, "why")
        connection.close()
        channel.close()

    uvloop.run(talk())


class TestWithoutLauncher:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "secret"}

    async def test_it_is_refused(self, client: httpx.AsyncClient) -> None:
        for path in ("/sleep", "/wake_up"):
            answer = await client.post(path)
            assert answer.status_code == 403
            assert "--enable-sleep-mode" in answer.json()["error"]
        assert not await sleeping(client)


class TestIdleSleepAlone:
    """``--sleep-idle-seconds`` without ``--enable-sleep-mode``."""

    @pytest.fixture
    def api_key(self) -> str | None:
        return None

    @pytest.fixture
    def settings(self, api_key: str | None) -> dict[str, Any]:
        return {"control_fd": 99, "sleep_idle_seconds": 600.0, "api_key": api_key}

    async def test_strangers_do_not_stop_it(
        self, client: httpx.AsyncClient, launcher: FakeLauncher
    ) -> None:
        answer = await client.post("/sleep")
        assert answer.status_code == 403
        assert "--enable-sleep-mode" in answer.json()["error"]
        assert not launcher.commands
        assert (await client.post("/wake_up")).status_code == 200

    @pytest.mark.parametrize("api_key", ["secret"])
    async def test_holders_of_a_key_do(
        self, client: httpx.AsyncClient, launcher: FakeLauncher
    ) -> None:
        await put_to_sleep(client)
        assert await sleeping(client)
        assert (await client.post("/wake_up")).status_code == 200
