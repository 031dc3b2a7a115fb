"""Real servers, as processes, on free ports, with a runtime folder of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tools.server_process import ServerProcess

StartServer = Callable[..., ServerProcess]


@contextmanager
def _servers() -> Iterator[StartServer]:
    """Start ``tgi serve`` with arguments and variables; all are ended with the block."""
    started: list[ServerProcess] = []
    # Not tmp_path: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as base:

        def start(*arguments: str, **environment: str) -> ServerProcess:
            address = ["--hostname", "127.0.0.1", "--port", "0"]
            folder = Path(base) / str(len(started))
            server = ServerProcess(folder, ["serve", *address, *arguments], environment)
            started.append(server)
            return server

        try:
            yield start
        finally:
            for server in started:
                server.kill()


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Start ``tgi serve`` with arguments and variables; all are ended with the module."""
    with _servers() as start:
        yield start


@pytest.fixture(scope="session")
def environments() -> Iterator[Path]:
    """The folder of environments that tests make: TGI_TEST_CLIENTS, or for this run alone."""
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as base:
        yield Path(os.environ.get("TGI_TEST_CLIENTS") or base)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server of the bundled model, shared by all tests that leave it as it is."""
    with _servers() as start:
        server = start()
        server.wait_ready()
        yield server
