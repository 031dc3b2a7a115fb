"""The sockets of TGI's own services, the loading of their text, and their end."""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from tests.tools.grpc_reflection import ReflectionClient
from tests.unit.model_server.fakes import INFO, ScriptedEngine
from tests.unit.model_server.test_main import CPU, MODEL, _Worker, model_server_config
from tests.unit.tgi_grpc.fakes import V3, FakeModelText, Heard, a_request, answer
from tgi_cli.config import EngineConfig, ServeConfig, resolve
from tgi_cli.errors import AddressInUseError, ConfigError, ModelError
from tgi_cli.model_server.adapters import AdapterRegistry
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.grpc_service import ServedEngine
from tgi_cli.model_server.main import run_model_server
from tgi_cli.tgi_grpc.mount import GenerateOptions, GenerateServices
from tgi_cli.worker import factory


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as path:
        yield Path(path)


def start(folder: Path, options: GenerateOptions) -> EngineServer:
    engine = ScriptedEngine()
    server = EngineServer(engine, INFO)
    path = folder / "engine.sock"
    served = ServedEngine(engine.inbox, INFO, server.adapters, path)
    server.services.append(GenerateServices(served, options))
    try:
        server.start(path)
    finally:
        engine.outbox.put(None)
    return server


def test_tgis_socket_path_ends_with_the_first_shards_number(folder: Path) -> None:
    tgi = folder / "text-generation-server"
    server = start(folder, GenerateOptions(lambda _info: FakeModelText(), uds_path=tgi))
    try:
        mode = (folder / "text-generation-server-0").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) & 0o077 == 0
        for target in (f"unix:{tgi}-0", f"unix:{folder}/engine.sock"):
            with ReflectionClient(target, V3) as client:
                assert client.ServiceDiscovery().urls == [f"unix://{tgi}-0"]
                assert "tgi.engine.v1.Engine" in client.services
    finally:
        server.stop()
    assert os.listdir(folder) == [], "both sockets are gone with the server"  # noqa: PTH208


def test_a_shared_folder_is_accepted_if_the_socket_cannot_be_replaced(
    folder: Path,
) -> None:
    options = GenerateOptions(lambda _info: FakeModelText(), uds_path=folder / "open" / "tgi")
    with pytest.raises(ConfigError, match="cannot be used"):
        start(folder, options)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="other users may replace files"):
        start(folder, options)
    (folder / "open").chmod(0o1777)  # as /tmp is
    (folder / "open" / "tgi-0").touch()
    server = start(folder, options)
    mode = (folder / "open" / "tgi-0").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) & 0o077 == 0
    server.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(folder / "open" / "tgi-0"))
        other.listen()
        with pytest.raises(AddressInUseError, match="listens on"):
            start(folder, options)
    with pytest.raises(ConfigError, match="longer than"):
        start(folder, GenerateOptions(options.load_text, uds_path=folder / "open" / ("x" * 100)))


def test_the_tokenizer_is_loaded_at_the_start_or_with_the_first_request(folder: Path) -> None:
    read: list[str] = []

    def texts(info: Any) -> FakeModelText:
        read.append(info.model_id)
        raise ModelError("there is no tokenizer")

    with pytest.raises(ModelError):
        start(folder, GenerateOptions(texts, uds_path=folder / "tgi"))
    assert read == ["org/model"]
    server = start(folder, GenerateOptions(texts))
    try:
        assert read == ["org/model"]
        with ReflectionClient(f"unix:{folder}/engine.sock", V3) as client:
            client.Info()
            assert len(read) == 1
            with pytest.raises(grpc.RpcError) as caught:
                client.Prefill(batch={"id": 1, "requests": [{"id": 7, "inputs": "1"}]})
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == "request 7: there is no tokenizer"
    finally:
        server.stop()


def test_a_call_after_the_end_of_the_loop_does_not_wait(folder: Path) -> None:
    nobody_reads: SimpleQueue[Any] = SimpleQueue()
    registry = AdapterRegistry(nobody_reads.put)
    options = GenerateOptions(lambda _info: FakeModelText())
    served = ServedEngine(nobody_reads, INFO, registry, folder / "engine.sock")
    services = GenerateServices(served, options)
    engine = ScriptedEngine()
    server = EngineServer(engine, INFO)
    server.services.append(services)
    server.start(folder / "engine.sock")
    try:
        with ReflectionClient(f"unix:{folder}/engine.sock", V3) as client:
            ended = threading.Timer(0.2, services.end, ["the engine broke"])
            ended.start()
            with pytest.raises(grpc.RpcError) as caught:
                client.Prefill(
                    batch={"id": 1, "requests": [a_request(client, 7, [5], 3)], "size": 1}
                )
            ended.join()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "batch 1: the engine broke"
    finally:
        engine.outbox.put(None)
        server.stop()


def test_draining_lets_callers_finish_their_batches(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    workers: list[_Worker] = []

    def load(serve: ServeConfig, path: Path, _progress: object) -> tuple[_Worker, EngineConfig]:
        workers.append(_Worker(resolve(serve, MODEL, CPU, path)))
        return workers[0], workers[0].config

    monkeypatch.setattr(factory, "load_worker", load)
    heard = Heard()
    refused: list[grpc.StatusCode] = []
    failures: list[BaseException] = []
    asked_to_leave = threading.Event()

    def leave() -> None:
        asked_to_leave.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def talk() -> None:
        try:
            end = time.monotonic() + 60
            while not (folder / "tgi-0").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            with ReflectionClient(f"unix:{folder}/tgi-0", V3) as client:
                request = a_request(client, 1, [5], 9)
                batch = heard(client.Prefill(batch={"id": 1, "requests": [request]})).batch
                leave()
                while not refused:
                    try:
                        client.Prefill(batch={"id": 2, "requests": [request]})
                        client.ClearCache(id=2)
                    except grpc.RpcError as error:
                        refused.append(error.code())
                heard.run_out(client, batch)
        except BaseException as error:  # raised below, when the server has ended
            failures.append(error)
            if not asked_to_leave.is_set():
                leave()

    before = signal.getsignal(signal.SIGTERM)
    talker = threading.Thread(target=talk)
    talker.start()
    try:
        options = GenerateOptions(lambda _info: FakeModelText(), uds_path=folder / "tgi")
        run_model_server(
            model_server_config(folder / "engine.sock"),
            [partial(GenerateServices, options=options)],
        )
    finally:
        talker.join(timeout=60)
        signal.signal(signal.SIGTERM, before)
    assert not failures, failures[0]
    assert refused == [grpc.StatusCode.UNAVAILABLE]
    assert heard.ids[1] == answer([5], 9)
    assert workers[0].closed
