"""Nobody but the owner reaches the socket, and a socket in use is left alone."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.model_server.fakes import INFO, ScriptedEngine
from tgi_cli.errors import AddressInUseError, ConfigError
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.process import unix_socket


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as name:
        yield Path(name)


def test_a_missing_folder_is_made_private(folder: Path) -> None:
    path = folder / "run" / "engine.sock"
    with pytest.raises(ConfigError, match="No such file"):
        unix_socket.claim(path)  # a removed folder is not made again
    assert not path.parent.exists()
    unix_socket.make_folder(path)
    unix_socket.claim(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="other users"):
        unix_socket.claim(folder / "engine.sock")


def test_a_path_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="longer than"):
        unix_socket.claim(folder / ("x" * 100))


def test_a_stale_socket_is_replaced(folder: Path) -> None:
    path = folder / "engine.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert path.exists()
    unix_socket.claim(path)
    assert not path.exists()


def test_a_socket_in_use_is_an_error(folder: Path) -> None:
    path = folder / "engine.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(AddressInUseError, match="listens on"):
            unix_socket.claim(path)
        assert path.exists()


def test_the_socket_is_private_and_removed_with_the_server(folder: Path) -> None:
    engine = ScriptedEngine()
    server = EngineServer(engine, INFO)
    server.start(folder / "engine.sock")
    assert stat.S_IMODE((folder / "engine.sock").stat().st_mode) == 0o600
    assert unix_socket.is_listening(folder / "engine.sock")
    engine.outbox.put(None)
    server.stop()
    assert not (folder / "engine.sock").exists()
