"""TCP addresses, and sessions over TCP: unencrypted, with TLS, and refused by TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.certificate_authority import Authority
from tests.unit.model_server.fakes import INFO, ScriptedEngine, request, until
from tests.unit.rpc.test_step_socket import generate
from tgi_cli.errors import AddressInUseError, ConfigError, ShardError
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.tcp_listener import TcpListener, tcp_listener
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
    client = await GrpcEngineClient.connect(url, timeout=60, tls=ours)
    try:
        assert client.info == INFO
        assert await generate(engine, client) == [5, 6, 7]
        (session,) = server.sessions
        assert session.steps is None, "there is no socket beside"
    finally:
        await client.close()
    assert await asyncio.to_thread(fetch_info, url, 10, ours) == INFO


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("wrong authority", "is not signed by an authority of .*stranger.pem"),
        ("another name", "is not for other.test"),
        ("no certificate", "requires client certificates"),
        ("wrong certificate", r"refuses the certificate .*stranger-router\.pem"),
        ("plain against tls", "requires TLS|closes the connection without data"),
        ("tls against plain", "does not use TLS"),
    ],
)
async def test_tls_failures_have_their_cause(
    start: Start, authority: Authority, stranger: Authority, kind: str, expected: str
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
    with pytest.raises(ShardError, match=expected):
        await GrpcEngineClient.connect(url, timeout=60, tls=ours)
    assert not server.sessions


async def test_an_expired_server_certificate_is_reported(
    start: Start, authority: Authority
) -> None:
    old = authority.issue("old", "127.0.0.1", expired=True)
    url, _ = start(TlsFiles(old.certificate, old.key))
    with pytest.raises(ShardError, match="has expired"):
        await GrpcEngineClient.connect(url, timeout=60, tls=client_files(authority))


async def test_a_refused_connection_is_retried(
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


async def test_a_broken_network_is_noticed_at_both_ends(
    engine: ScriptedEngine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 4000,
        "grpc.http2.ping_timeout_ms": 4000,
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
        client = await GrpcEngineClient.connect(f"tcp://127.0.0.1:{port}", timeout=60)
        try:
            assert await generate(engine, client) == [5, 6, 7]
            stream = client.submit(request(client.next_request_id()))
            await engine.taken()
            relay.pull()
            async with asyncio.timeout(60):
                batches = [batch async for batch in stream]
            assert batches[-1].finished is not None
            assert batches[-1].finished.error == GONE
            await until(lambda: not server.sessions)
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("url", "more", "expected"),
    [
        ("tcp://0.0.0.0:1", {}, "could command the model"),
        ("gpu-7:1", {}, "could command the model"),
        ("tcp://[::]:1", {}, "could command the model"),
        ("tcp://0.0.0.0:1", {"certificate": True}, "could command the model"),
        ("grpcs://127.0.0.1:1", {}, "needs a certificate"),
        ("tcp://127.0.0.1:1", {"client_ca": True}, "no certificate of the server"),
        (None, {"insecure": True}, "need --engine-listen"),
        (None, {"certificate": True}, "need --engine-listen"),
        ("http://127.0.0.1:1", {}, "is not an address of a model server"),
    ],
)
def test_unsafe_listen_addresses_are_refused(
    tmp_path: Path, url: str | None, more: dict[str, bool], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        tcp_listener(url, **_files(tmp_path, more))


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("tcp://127.0.0.1:1", {}),
        ("localhost:1", {}),
        ("tcp://[::1]:1", {}),
        ("tcp://0.0.0.0:1", {"insecure": True}),
        ("tcp://0.0.0.0:1", {"certificate": True, "insecure": True}),
        ("grpcs://0.0.0.0:1", {"certificate": True, "client_ca": True}),
    ],
)
def test_safe_listen_addresses_are_accepted(
    tmp_path: Path, url: str, more: dict[str, bool]
) -> None:
    listen = tcp_listener(url, **_files(tmp_path, more))
    assert listen is not None
    assert listen.port == 1
    assert (listen.tls is not None) == ("certificate" in more)


def _files(folder: Path, wanted: dict[str, bool]) -> dict[str, Any]:
    authority = Authority(folder)
    issued = authority.issue("server", "localhost")
    flags: dict[str, Any] = {name: yes for name, yes in wanted.items() if name == "insecure"}
    if wanted.get("certificate"):
        flags |= {"certificate": issued.certificate, "key": issued.key}
    if wanted.get("client_ca"):
        flags["client_ca"] = authority.certificate
    return flags


def test_there_is_no_listener_without_an_address() -> None:
    assert tcp_listener(None) is None


def test_an_unavailable_address_is_an_error_before_a_model_is_loaded() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(AddressInUseError, match="is in use"),
    ):
        TcpListener("127.0.0.1", taken.getsockname()[1]).claim()
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        TcpListener("192.0.2.1", 50051).claim()
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        TcpListener("no-such-host.invalid", 50051).claim()
    TcpListener("127.0.0.1", 0).claim()


def test_an_exposed_unencrypted_address_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Server:
        def add_insecure_port(self, target: str) -> int:
            return int(target.rpartition(":")[2])

    with caplog.at_level(logging.INFO):
        for host, level in (("0.0.0.0", logging.WARNING), ("127.0.0.1", logging.INFO)):
            caplog.clear()
            TcpListener(host, 5).add_to(Server())  # type: ignore[arg-type]
            (record,) = caplog.records
            assert record.levelno == level
            assert record.getMessage() == f"listening on tcp://{host}:5, unencrypted"
