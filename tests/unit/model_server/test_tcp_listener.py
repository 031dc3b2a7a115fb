"""Sessions over TCP: in the clear, with TLS, and with somebody who is kept apart by it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.certificate_authority import Authority
from tests.unit.model_server.fakes import INFO, ScriptedEngine, request, until
from tests.unit.rpc.test_step_socket import generate
from tgi_cli.errors import ShardError
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.tcp_listener import TcpListener
from tgi_cli.rpc import channel_options, tls_probe
from tgi_cli.rpc.client import GrpcEngineClient, fetch_info
from tgi_cli.rpc.interface import GONE
from tgi_cli.rpc.tls import TlsFiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "stranger")


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


Start = Callable[[TlsFiles | None], tuple[str, EngineServer]]


@pytest.fixture
def start(engine: ScriptedEngine) -> Iterator[Start]:
    """Start a server with or without TLS; its address and itself."""
    with contextlib.ExitStack() as ends:

        def run(tls: TlsFiles | None) -> tuple[str, EngineServer]:
            base = ends.enter_context(tempfile.TemporaryDirectory(prefix="tgi-test-"))
            port = free_port()
            server = EngineServer(engine, INFO)
            server.services.append(TcpListener("127.0.0.1", port, tls))
            server.start(Path(base) / "engine.sock")

            def end() -> None:
                engine.outbox.put(None)
                server.stop()

            ends.callback(end)
            return f"tcp://127.0.0.1:{port}", server

        yield run


def server_files(authority: Authority, *, clients: Authority | None = None) -> TlsFiles:
    issued = authority.issue("server", "127.0.0.1", "engine.test")
    demanded = None if clients is None else clients.certificate
    return TlsFiles(issued.certificate, issued.key, demanded)


def client_files(authority: Authority, *, own: Authority | None = None) -> TlsFiles:
    if own is None:
        return TlsFiles(authority=authority.certificate)
    issued = own.issue("router")
    return TlsFiles(issued.certificate, issued.key, authority.certificate)


@pytest.mark.parametrize("kind", ["plain", "tls", "mutual", "by another name"])
async def test_a_session_is_the_same_over_tcp(
    engine: ScriptedEngine, start: Start, authority: Authority, kind: str
) -> None:
    ours = theirs = None
    if kind != "plain":
        mutual = authority if kind == "mutual" else None
        theirs = server_files(authority, clients=mutual)
        ours = client_files(authority, own=mutual)
    if kind == "by another name":
        assert ours is not None
        ours = TlsFiles(authority=ours.authority, server_name="engine.test")
    url, server = start(theirs)
    client = await GrpcEngineClient.connect(url, timeout=20, tls=ours)
    try:
        assert client.info == INFO
        assert await generate(engine, client) == [5, 6, 7]
        (session,) = server.sessions
        assert session.steps is None, "there is no socket beside"
    finally:
        await client.close()
    assert await asyncio.to_thread(fetch_info, url, 10, ours) == INFO


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("wrong authority", "is signed by nobody in .*stranger.pem"),
        ("another name", "is not for other.test"),
        ("no certificate", "demands a certificate of its clients"),
        ("wrong certificate", r"refuses the certificate .*stranger-router\.pem"),
        ("plain against tls", "speaks TLS|closes the connection without a word"),
        ("tls against plain", "speaks no TLS"),
    ],
)
async def test_what_tls_keeps_apart_is_told(
    start: Start, authority: Authority, stranger: Authority, kind: str, said: str
) -> None:
    theirs: TlsFiles | None = server_files(authority, clients=authority)
    ours: TlsFiles | None = client_files(authority, own=authority)
    match kind:
        case "wrong authority":
            ours = client_files(stranger, own=authority)
        case "another name":
            issued = authority.issue("router")
            ours = TlsFiles(issued.certificate, issued.key, authority.certificate, "other.test")
        case "no certificate":
            ours = client_files(authority)
        case "wrong certificate":
            ours = client_files(authority, own=stranger)
        case "plain against tls":
            ours = None
        case "tls against plain":
            theirs = None
    url, server = start(theirs)
    with pytest.raises(ShardError, match=said):
        await GrpcEngineClient.connect(url, timeout=20, tls=ours)
    assert not server.sessions


async def test_an_expired_certificate_of_the_server_is_told(
    start: Start, authority: Authority
) -> None:
    old = authority.issue("old", "127.0.0.1", expired=True)
    url, _ = start(TlsFiles(old.certificate, old.key))
    with pytest.raises(ShardError, match="has expired"):
        await GrpcEngineClient.connect(url, timeout=20, tls=client_files(authority))


async def test_nobody_there_is_waited_for(
    engine: ScriptedEngine, start: Start, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_probe, "_PAUSE_SECONDS", 0.05)
    url = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(ShardError, match="no model server answered"):
        await GrpcEngineClient.connect(url, timeout=0.5, tls=client_files(authority))


class Relay:
    """A cable between two ends: it can be pulled out without a word to either."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for task in self._tasks:
                task.cancel()
            server.close()

    def pull(self) -> None:
        self._whole.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.append(asyncio.create_task(self._pass(source, sink)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while content := await source.read(1 << 16):
                await self._whole.wait()
                sink.write(content)
        sink.close()


async def test_a_cable_that_is_pulled_is_noticed_at_both_ends(
    engine: ScriptedEngine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 1000,
        "grpc.http2.ping_timeout_ms": 1000,
        "grpc.http2.min_ping_interval_without_data_ms": 500,
    }
    for name in ("TCP_SERVER", "TCP_CLIENT"):
        known = dict(getattr(channel_options, name))
        assert known["grpc.keepalive_time_ms"] <= 30_000
        assert known["grpc.keepalive_timeout_ms"] <= 30_000
        monkeypatch.setattr(channel_options, name, list((known | quick).items()))
    url, server = start(None)
    relay = Relay(int(url.rpartition(":")[2]))
    async with relay() as port:
        client = await GrpcEngineClient.connect(f"tcp://127.0.0.1:{port}", timeout=20)
        try:
            assert await generate(engine, client) == [5, 6, 7]
            stream = client.submit(request(client.next_request_id()))
            await engine.taken()
            relay.pull()
            began = time.monotonic()
            async with asyncio.timeout(30):
                batches = [batch async for batch in stream]
            assert batches[-1].finished is not None
            assert batches[-1].finished.error == GONE
            await until(lambda: not server.sessions, 30)
            assert time.monotonic() - began < 30
        finally:
            await client.close()
