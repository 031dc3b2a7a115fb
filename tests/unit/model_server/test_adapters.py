"""Adapters by name: in the registry, and over a real socket around an engine of two queues."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.unit.model_server.fakes import INFO, ScriptedEngine, request
from tgi_cli.engine.messages import (
    AdapterAnswer,
    FinishReason,
    GenerationRequest,
    LoadAdapter,
    StepOutputs,
    UnloadAdapter,
)
from tgi_cli.errors import ShardError
from tgi_cli.model_server.adapters import MAX_CALLS
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.main import open_socket
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.rpc.interface import Adapter, AdapterError, AdapterFault, Adapters


@pytest.fixture
def socket_path() -> Iterator[Path]:
    # Not tmp_path: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        yield Path(folder) / "engine.sock"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def max_loras() -> int:
    return 2


@pytest.fixture
def server(engine: ScriptedEngine, socket_path: Path, max_loras: int) -> Iterator[EngineServer]:
    server = EngineServer(engine, INFO, max_loras=max_loras)
    server.start(socket_path)
    yield server
    engine.outbox.put(None)
    server.stop()


@pytest_asyncio.fixture
async def client(server: EngineServer, socket_path: Path) -> AsyncIterator[GrpcEngineClient]:
    client = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    yield client
    await client.close()


def adapter(folder: Path, base: str = "org/model") -> Path:
    """Files that look like an adapter until the weights are read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder.resolve()


async def answered(engine: ScriptedEngine, error: str = "") -> LoadAdapter:
    """The next message is a LoadAdapter: answer it."""
    message = await engine.taken()
    assert isinstance(message, LoadAdapter)
    engine.outbox.put(StepOutputs(adapters=[AdapterAnswer(message.adapter_id, error)]))
    return message


async def load(
    client: GrpcEngineClient, engine: ScriptedEngine, name: str, path: Path, in_place: bool = False
) -> LoadAdapter:
    task = asyncio.create_task(client.load_adapter(name, str(path), in_place))
    message = await answered(engine)
    await asyncio.wait_for(task, 60)
    return message


async def test_a_request_names_an_adapter_and_the_engine_gets_its_id(
    client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    assert client.adapters == Adapters(2)
    first = await load(client, engine, "one", one)
    second = await load(client, engine, "two", two)
    assert (first.name, first.path, second.path) == ("one", str(one), str(two))
    assert 0 < first.adapter_id != second.adapter_id > 0
    assert client.adapters == Adapters(2, (Adapter("one", str(one)), Adapter("two", str(two))))
    ids = []
    for name in ("two", "", "one"):
        client.submit(request(client.next_request_id() + len(ids)), name)
        taken = await engine.taken()
        assert isinstance(taken, GenerationRequest)
        ids.append(taken.adapter_id)
    assert ids == [second.adapter_id, 0, first.adapter_id]


async def test_an_unknown_name_is_refused_and_never_becomes_the_base(
    client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    await load(client, engine, "one", adapter(tmp_path / "one"))
    async for batch in client.submit(request(3), "other"):
        assert batch.finished is not None
        assert batch.finished.reason is FinishReason.ERROR
        assert batch.finished.error == "there is no adapter 'other'; there are: one"
    assert engine.inbox.empty()


async def test_a_reloaded_name_gets_a_new_id(
    client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = adapter(tmp_path / "one")
    first = await load(client, engine, "one", path)
    assert (await client.unload_adapter("one")).loaded == ()
    assert await engine.taken() == UnloadAdapter(first.adapter_id)
    second = await load(client, engine, "one", path)
    assert second.adapter_id != first.adapter_id
    # Replaced: the new one is loaded first, so that the name is never without an adapter.
    third = await load(client, engine, "one", path, in_place=True)
    assert await engine.taken() == UnloadAdapter(second.adapter_id)
    client.submit(request(9), "one")
    taken = await engine.taken()
    assert isinstance(taken, GenerationRequest)
    assert taken.adapter_id == third.adapter_id


async def test_adapters_that_cannot_be_loaded_are_refused(
    client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = adapter(tmp_path / "one")
    await load(client, engine, "one", path)
    cases = [
        ("one", str(path), AdapterFault.TAKEN, "loaded already"),
        ("org/model", str(path), AdapterFault.UNUSABLE, "name of the base model"),
        ("tgi", str(path), AdapterFault.UNUSABLE, "name of the base model"),
        ("a b", str(path), AdapterFault.UNUSABLE, "cannot be the name"),
        ("two", f"{tmp_path}/none", AdapterFault.UNKNOWN, "no folder"),
        ("two", "../one", AdapterFault.UNKNOWN, "no folder"),
        ("two", str(tmp_path), AdapterFault.UNUSABLE, "not an adapter"),
    ]
    for name, source, fault, expected in cases:
        with pytest.raises(AdapterError, match=expected) as caught:
            await client.load_adapter(name, source)
        assert caught.value.fault is fault
    assert engine.inbox.empty()
    task = asyncio.create_task(client.load_adapter("two", str(path)))
    await answered(engine, "its rank 64 is more than 16; raise --max-lora-rank")
    with pytest.raises(AdapterError, match="--max-lora-rank") as caught:
        await asyncio.wait_for(task, 60)
    assert caught.value.fault is AdapterFault.UNUSABLE
    with pytest.raises(AdapterError, match="no adapter 'two'; there are: one") as caught:
        await client.unload_adapter("two")
    assert caught.value.fault is AdapterFault.UNKNOWN
    assert (await client.list_adapters()).names == ["one"]


@pytest.mark.parametrize("letter", ["n", "é", "\U0001f999"])
async def test_names_and_paths_that_are_too_long_are_refused(
    client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path, letter: str
) -> None:
    """And not with "Stream removed", which is what a status too long for its header becomes."""
    path, long = adapter(tmp_path / "one"), letter * 100_000
    for call, expected, fault in (
        (client.load_adapter(long, str(path)), "name has 100000 char", AdapterFault.UNUSABLE),
        (
            client.load_adapter("a", "/" + long),
            "id has 100001 characters",
            AdapterFault.UNUSABLE,
        ),
        (
            client.load_adapter("a", "/" + letter * 4000),
            "invalid adapter path",
            AdapterFault.UNUSABLE,
        ),
        (client.unload_adapter(long), "name of 100000 characters", AdapterFault.UNKNOWN),
    ):
        with pytest.raises(AdapterError, match=expected) as caught:
            await call
        assert caught.value.fault is fault
    async for batch in client.submit(request(3), long):
        assert batch.finished is not None
        assert "name of 100000 characters" in batch.finished.error
    assert engine.inbox.empty()
    await load(client, engine, "n" * 256, path)


async def test_concurrent_loads_are_limited_and_other_calls_are_answered(
    client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = str(adapter(tmp_path / "one"))
    tasks = [asyncio.create_task(client.load_adapter(str(i), path)) for i in range(MAX_CALLS)]
    messages = [await engine.taken() for _ in tasks]
    with pytest.raises(AdapterError, match="try again") as caught:
        await client.load_adapter("more", path)
    assert caught.value.fault is AdapterFault.BUSY
    assert await client.healthy()
    for message in messages:
        assert isinstance(message, LoadAdapter)
        engine.outbox.put(StepOutputs(adapters=[AdapterAnswer(message.adapter_id)]))
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert sorted((await client.list_adapters()).names) == ["0", "1", "2", "3"]


async def test_another_client_sees_a_change_when_it_lists_adapters(
    client: GrpcEngineClient, engine: ScriptedEngine, socket_path: Path, tmp_path: Path
) -> None:
    other = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    await load(client, engine, "one", adapter(tmp_path / "one"))
    assert other.adapters.names == []
    assert (await other.list_adapters()).names == ["one"]
    assert other.adapters.names == ["one"]
    third = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    assert third.adapters.names == ["one"]
    await asyncio.gather(other.close(), third.close())


async def test_a_pending_load_fails_when_the_engine_ends(
    client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = str(adapter(tmp_path / "one"))
    task = asyncio.create_task(client.load_adapter("one", path))
    assert isinstance(await engine.taken(), LoadAdapter)
    engine.outbox.put(None)
    with pytest.raises(ShardError, match="the engine has ended"):
        await asyncio.wait_for(task, 60)
    with pytest.raises(ShardError, match="the engine has ended"):
        await client.load_adapter("one", path)


async def test_an_adapter_of_another_base_logs_a_warning(
    client: GrpcEngineClient,
    engine: ScriptedEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="tgi_cli"):
        await load(client, engine, "one", adapter(tmp_path / "one", base="elsewhere/Model"))
        assert caplog.text == ""
        await load(client, engine, "two", adapter(tmp_path / "two", base="org/other"))
    assert "the adapter two names org/other as its base, and org/model is served" in caplog.text


class TestWithoutRoom:
    @pytest.fixture
    def max_loras(self) -> int:
        return 0

    async def test_loading_is_refused_when_adapters_are_off(
        self, client: GrpcEngineClient, engine: ScriptedEngine, tmp_path: Path
    ) -> None:
        assert client.adapters == Adapters()
        with pytest.raises(AdapterError, match="--max-loras") as caught:
            await client.load_adapter("one", str(adapter(tmp_path / "one")))
        assert caught.value.fault is AdapterFault.OFF
        assert engine.inbox.empty()


async def test_the_socket_opens_once_the_adapters_are_loaded(
    engine: ScriptedEngine, socket_path: Path, tmp_path: Path
) -> None:
    server = EngineServer(engine, INFO, max_loras=2)
    items = [f"one={adapter(tmp_path / 'one')}", f"two={adapter(tmp_path / 'two')}"]
    opened = open_socket(server, items, socket_path)
    await answered(engine)
    second = await engine.taken()
    assert isinstance(second, LoadAdapter)
    assert not socket_path.exists()  # noqa: ASYNC240
    engine.outbox.put(StepOutputs(adapters=[AdapterAnswer(second.adapter_id)]))
    client = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    assert client.adapters.names == ["one", "two"]
    await client.close()
    engine.outbox.put(None)
    assert await asyncio.to_thread(opened.result)
    server.stop()


async def test_an_adapter_that_fails_prevents_the_start(
    engine: ScriptedEngine, socket_path: Path, tmp_path: Path
) -> None:
    server = EngineServer(engine, INFO, max_loras=2)
    items = [f"one={adapter(tmp_path / 'one')}", f"two={adapter(tmp_path / 'two')}"]
    opened = open_socket(server, items, socket_path)
    await answered(engine, "a tensor does not fit")
    with pytest.raises(AdapterError) as caught:
        await asyncio.wrap_future(opened)
    assert caught.value.cause == "a tensor does not fit"
    engine.outbox.put(None)
    server.stop()
    assert not socket_path.exists()  # noqa: ASYNC240
