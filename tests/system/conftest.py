"""Real servers, as processes, on free ports, with a runtime folder of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.server_process import ServerProcess

StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def start_server() -> Iterator[StartServer]:
    """Start ``tgi serve`` with arguments and variables; all are ended with the session."""
    started: list[ServerProcess] = []
    # Not tmp_path: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as base:

        def start(*arguments: str, **environment: str) -> ServerProcess:
            address = ["--hostname", "127.0.0.1", "--port", "0"]
            folder = Path(base) / str(len(started))
            server = ServerProcess(folder, ["serve", *address, *arguments], environment)
            started.append(server)
            return server

        yield start
        for server in started:
            server.kill()


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> ServerProcess:
    """A server of the bundled model, shared by all tests that leave it as it is."""
    server = start_server()
    server.wait_ready()
    return server
