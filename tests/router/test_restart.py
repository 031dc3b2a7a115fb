"""After a restart of the engine its limits apply, and dynamic adapters are restored."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tgi_cli.errors import ShardError
from tgi_cli.router import engine_restart
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.interface import Adapter, AdapterError, AdapterFault, Adapters

SMALL: dict[str, Any] = {"max_input_tokens": 7, "max_total_tokens": 8, "max_batch_total_tokens": 32}
MAX_SECONDS = 60.0


def native(adapter_id: str | None = None, new_tokens: int = 3, words: int = 1) -> dict[str, Any]:
    parameters = {"max_new_tokens": new_tokens, "adapter_id": adapter_id}
    return {"inputs": "hello " * words, "parameters": parameters}


async def status(client: httpx.AsyncClient, body: dict[str, Any]) -> int:
    async with asyncio.timeout(MAX_SECONDS):
        return (await client.post("/generate", json=body)).status_code


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those of the module under test."""
    records = [one for one in caplog.records if one.levelno >= logging.WARNING]
    return [one.message for one in records if one.name == engine_restart.__name__]


def restart_meanwhile(
    state: RouterState, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have a smaller engine take the place of the one for which a request is being prepared."""
    prepare = state.generator._prepare

    async def slow(spec: Any) -> Any:
        prompt = await prepare(spec)
        engine.restart(**SMALL)
        return prompt

    monkeypatch.setattr(state.generator, "_prepare", slow)


class TestLimits:
    async def test_limits_of_a_smaller_engine_apply(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        assert await status(client, native(new_tokens=20)) == 200
        assert "\ntgi_batch_max_total_tokens 1024\n" in (await client.get("/metrics")).text
        engine.restart(**SMALL)
        answer = await client.post("/generate", json=native(new_tokens=20))
        assert answer.status_code == 422
        assert "must be <= 8" in answer.json()["error"]
        reported = (await client.get("/info")).json()
        assert (reported["max_input_tokens"], reported["max_total_tokens"]) == (7, 8)
        shown = (await client.get("/metrics")).text
        assert "\ntgi_batch_max_total_tokens 32\n" in shown
        assert 'num_blocks="2"' in shown
        assert await status(client, native(new_tokens=3)) == 200
        (warning,) = warnings(caplog)
        for change in ("max_input_tokens 7 (was 63)", "max_total_tokens 8 (was 64)"):
            assert change in warning

    async def test_limits_of_a_larger_engine_apply(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        assert await status(client, native(new_tokens=100)) == 422
        engine.restart(max_total_tokens=200, max_input_tokens=199)
        assert await status(client, native(new_tokens=100)) == 200

    async def test_stop_ids_of_the_new_engine_apply(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.restart(eos_token_ids=(5, 9))
        assert await status(client, native()) == 200
        assert engine.requests[-1].stop_token_ids == {5, 9}

    async def test_same_engine_logs_no_warning(
        self, engine: FakeEngine, state: RouterState, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.restart(load_seconds=7.0, step_seconds=3.0)
        assert not warnings(caplog)
        assert state.generator.info.load_seconds == 7.0

    async def test_another_model_is_logged_as_an_error(
        self, engine: FakeEngine, state: RouterState, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.restart(model_id="other", vocab_size=7)
        assert "tokenizer of tiny" in warnings(caplog)[-1]

    @pytest.mark.parametrize("body", [native(new_tokens=20), native(words=5, new_tokens=1)])
    async def test_prepared_request_is_refused_if_a_smaller_engine_comes(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        monkeypatch: pytest.MonkeyPatch,
        body: dict[str, Any],
    ) -> None:
        restart_meanwhile(state, engine, monkeypatch)
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 422
        assert "must be <= 8" in answer.json()["error"]
        assert not engine.requests
        assert state.admission.in_flight == 0

    async def test_unlimited_request_gets_the_new_limit(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        restart_meanwhile(state, engine, monkeypatch)
        body = {"model": "tgi", "prompt": "hello"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        (request,) = engine.requests
        assert request.max_new_tokens == 8 - len(request.prompt_ids)


class TestBoundedLimits:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_input_tokens": 20, "max_total_tokens": 30}

    async def test_limits_of_the_router_remain(
        self, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.restart(max_total_tokens=200, max_input_tokens=199)
        info = state.generator.info
        assert (info.max_input_tokens, info.max_total_tokens) == (20, 30)
        engine.restart(**SMALL)
        info = state.generator.info
        assert (info.max_input_tokens, info.max_total_tokens) == (7, 8)


class TestAdapters:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "secret"}

    @pytest.fixture(autouse=True)
    def key(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client.headers["authorization"] = "Bearer secret"
        engine.adapters = engine.there = Adapters(4)
        monkeypatch.setattr(engine_restart, "_RETRY_SECONDS", 0.0)

    async def load(self, client: httpx.AsyncClient, *names: str, in_place: bool = False) -> None:
        for name in names:
            body = {"lora_name": name, "lora_path": f"/{name}", "load_inplace": in_place}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200

    async def test_loaded_adapters_are_restored_and_unloaded_are_not(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await self.load(client, "one", "two", "three")
        gone = {"lora_name": "two"}
        assert (await client.post("/v1/unload_lora_adapter", json=gone)).status_code == 200
        for _ in range(2):
            engine.restart()
            assert not engine.there.names
            assert await status(client, native("three")) == 200
            assert await status(client, native("one")) == 200
            assert engine.used[-2:] == ["three", "one"]
            assert await status(client, native("two")) == 422
            assert engine.there.loaded == (Adapter("one", "/one"), Adapter("three", "/three"))

    async def test_adapters_of_the_command_line_are_not_restored(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names("named", "other")
        await self.load(client, "one")
        await self.load(client, "other", in_place=True)
        engine.restart(*(Adapter(name, f"/adapters/{name}") for name in ("named", "other")))
        assert await status(client, native("one")) == 200
        assert await status(client, native("other")) == 200
        found = {adapter.name: adapter.path for adapter in engine.there.loaded}
        assert found == {"named": "/adapters/named", "one": "/one", "other": "/other"}
        assert "named" not in engine.loading

    async def test_requests_wait_for_their_own_adapter_only(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await self.load(client, "one")
        engine.opened.clear()
        engine.restart()
        waiting = [
            asyncio.create_task(status(client, native("one"))),
            asyncio.create_task(self.unload(client, "one")),
        ]
        assert await status(client, native()) == 200
        assert await status(client, native("none")) == 422
        assert engine.used == [""]
        assert not any(one.done() for one in waiting)
        engine.opened.set()
        async with asyncio.timeout(MAX_SECONDS):
            assert sorted(await asyncio.gather(*waiting)) == [200, 200]
        assert engine.used == ["", "one"]

    async def unload(self, client: httpx.AsyncClient, name: str) -> int:
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        return answer.status_code

    async def test_slow_restore_is_a_503(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self.load(client, "one")
        monkeypatch.setattr(engine_restart, "_WAIT_SECONDS", 0.01)
        engine.opened.clear()
        engine.restart()
        answer = await client.post("/v1/completions", json={"model": "one", "prompt": "hello"})
        assert answer.status_code == 503
        assert "still being loaded again" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0

    async def test_adapter_that_cannot_be_restored_is_dropped(
        self, client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        await self.load(client, "bad", "one")
        engine.faults["bad"] = [AdapterError("its files are gone")]
        engine.restart()
        assert await status(client, native("one")) == 200
        answer = await client.post("/generate", json=native("bad"))
        assert answer.status_code == 422
        assert "does not exist; adapters: one" in answer.json()["error"]
        (warning,) = warnings(caplog)
        assert "adapter bad: dropped" in warning
        assert "its files are gone" in warning
        engine.loading.clear()
        engine.restart()
        assert await status(client, native("one")) == 200
        assert engine.loading == ["one"], "it is not asked for again"

    @pytest.mark.parametrize(
        "fault",
        [AdapterError("4 are being loaded", "", AdapterFault.BUSY), ShardError("no answer")],
    )
    async def test_busy_engine_is_retried(
        self, client: httpx.AsyncClient, engine: FakeEngine, fault: Exception
    ) -> None:
        await self.load(client, "one")
        engine.faults["one"] = [fault, fault]
        engine.restart()
        assert await status(client, native("one")) == 200
        assert engine.loading == ["one"] * 4

    async def test_unresponsive_engine_is_not_retried_forever(
        self, client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        await self.load(client, "one")
        engine.faults["one"] = [ShardError("no answer")] * 99
        engine.restart()
        assert await status(client, native("one")) == 422
        assert "adapter one: dropped" in warnings(caplog)[0]

    async def test_adapter_with_a_lost_folder_is_loaded_from_its_source(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.folders["org/one@v2"] = "/cache/one"
        body = {"lora_name": "one", "lora_path": "org/one@v2"}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        engine.restart()
        assert await status(client, native("one")) == 200
        assert engine.sources == ["org/one@v2", "/cache/one"], "what was loaded, not what is new"
        engine.faults["one"] = [AdapterError("no folder", "", AdapterFault.UNKNOWN)]
        engine.restart()
        assert await status(client, native("one")) == 200
        assert engine.sources[2:] == ["/cache/one", "org/one@v2"]

    @pytest.mark.parametrize("another", [True, False])
    async def test_restore_resumes_when_a_lost_engine_is_found(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        caplog: pytest.LogCaptureFixture,
        another: bool,
    ) -> None:
        await self.load(client, "one", "two")
        engine.lost_after = 1
        engine.restart()
        assert await status(client, native("two")) == 503
        assert engine.there.names == ["one"]
        assert await status(client, native("one")) == 503, "there is no engine at all"
        engine.restart(another=another)
        assert await status(client, native("two")) == 200
        assert await status(client, native("one")) == 200
        assert engine.loading[2:] == ["one", "two", *(["one"] if another else []), "two"]
        assert not warnings(caplog)

    async def test_nothing_is_restored_in_the_same_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """Another router may have unloaded it meanwhile."""
        await self.load(client, "one")
        engine.there = Adapters(4)
        engine.restart(another=False)
        assert await status(client, native("one")) == 422
        assert engine.loading == ["one"]

    async def test_adapter_changed_by_another_router_is_not_restored(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        await self.load(client, "one", "two", "three")
        engine.there = Adapters(4, (Adapter("two", "/two"), Adapter("three", "/other")))
        await state.adapters.refresh(-1.0)
        engine.restart()
        assert await status(client, native("two")) == 200
        assert engine.loading[3:] == ["two"]

    async def test_adapter_restored_by_another_router_is_not_replaced(
        self, client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        await self.load(client, "one")
        engine.opened.clear()
        engine.restart()
        engine.there = Adapters(4, (Adapter("one", "/its"),))
        engine.opened.set()
        assert await status(client, native("one")) == 200
        assert engine.there.loaded == (Adapter("one", "/its"),)
        assert not warnings(caplog)

    async def test_restore_survives_an_engine_lost_while_listing(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await self.load(client, "one")
        engine.faults["one"] = [AdapterError("it is loaded", "", AdapterFault.TAKEN)]
        asked = asyncio.Event()

        async def ask() -> Adapters:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        with monkeypatch.context() as silent:
            silent.setattr(engine, "list_adapters", ask)
            engine.restart()
            async with asyncio.timeout(MAX_SECONDS):
                await asked.wait()
            engine.restart(another=False)
        async with asyncio.timeout(MAX_SECONDS):
            await state.adapters.dynamic.settled("one")
        assert await status(client, native("one")) == 422
