from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.model_server.fakes import INFO, ScriptedEngine, request
from tgi_cli.engine.messages import Finished, FinishReason, StepOutputs
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc import step_socket
from tgi_cli.rpc.client import GrpcEngineClient


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as name:
        yield Path(name)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(engine: ScriptedEngine, folder: Path) -> Iterator[EngineServer]:
    server = EngineServer(engine, INFO)
    server.start(folder / "engine.sock")
    yield server
    engine.outbox.put(None)
    server.stop()


async def generate(engine: ScriptedEngine, client: GrpcEngineClient) -> list[int]:
    """Three steps of one request, as the client sees them."""
    stream = client.submit(request(client.next_request_id()))
    engine_id = (await engine.taken()).request_id
    for token in (5, 6, 7):
        engine.put_tokens((engine_id, token))
    engine.outbox.put(StepOutputs(finished=[Finished(engine_id, FinishReason.LENGTH)]))
    return [token async for batch in stream for token in batch.token_ids]


async def test_steps_use_a_socket_that_leaves_no_file(server, engine, folder):
    client = await GrpcEngineClient.connect(f"unix:{folder / 'engine.sock'}", timeout=60)
    try:
        assert await generate(engine, client) == [5, 6, 7]
        (session,) = server.sessions
        assert session.steps is not None
        assert [path.name for path in folder.iterdir()] == ["engine.sock"]
    finally:
        await client.close()


@pytest.mark.parametrize("end", ["client", "server"])
async def test_steps_use_grpc_without_a_private_folder(monkeypatch, server, engine, folder, end):
    if end == "client":
        monkeypatch.setattr(step_socket.Listener, "beside", lambda target: None)
    else:
        monkeypatch.setattr(step_socket, "connect", lambda folder, name: None)
    client = await GrpcEngineClient.connect(f"unix:{folder / 'engine.sock'}", timeout=60)
    try:
        assert await generate(engine, client) == [5, 6, 7]
        (session,) = server.sessions
        assert session.steps is None
        assert [path.name for path in folder.iterdir()] == ["engine.sock"]
    finally:
        await client.close()


async def test_a_client_that_is_gone_leaves_no_writer_behind(server, engine, folder):
    client = await GrpcEngineClient.connect(f"unix:{folder / 'engine.sock'}", timeout=60)
    client.submit(request(client.next_request_id()))
    await engine.taken()
    (session,) = server.sessions
    await client.close()
    end = asyncio.get_running_loop().time() + 10
    while server.sessions or session.steps.fileno() >= 0:
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def test_only_valid_socket_names_are_connected_to(folder):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "engine.sock"))
        other.listen(1)
        assert step_socket.connect(folder / "x", "../engine.sock") is None
        assert step_socket.connect(folder, "engine.sock") is None
        assert step_socket.connect(folder, "steps-01234567") is None


def test_sending_ends_when_the_reader_is_gone():
    ours, theirs = socket.socketpair()
    theirs.close()
    step_socket.send(ours, (pb.StepMessage(token_ids=[count]) for count in range(10)))
    assert ours.fileno() < 0


async def test_messages_arrive_whole_however_they_are_cut():
    ours, theirs = socket.socketpair()
    messages = [pb.StepMessage(), *(pb.StepMessage(token_ids=range(n)) for n in (1, 300, 5))]
    step_socket.send(ours, messages)
    content = theirs.recv(1 << 16)
    theirs.close()
    for size in (1, 3, 7, len(content)):
        taken: list[pb.StepMessage] = []
        reader = step_socket.Reader(taken.append)
        for start in range(0, len(content), size):
            reader.data_received(content[start : start + size])
        assert taken == messages
        reader.connection_lost(None)
        await reader.ended


async def test_an_error_in_delivery_ends_the_connection():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def refuse(message: pb.StepMessage) -> None:
        raise ValueError("a defect")

    loop = asyncio.get_running_loop()
    reader = step_socket.Reader(refuse)
    await loop.create_unix_connection(lambda: reader, sock=theirs)
    await asyncio.to_thread(step_socket.send, ours, [pb.StepMessage(token_ids=[1])])
    with pytest.raises(ValueError, match="a defect"):
        await asyncio.wait_for(reader.ended, 60)
