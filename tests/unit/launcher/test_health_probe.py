"""Tests of the launcher's health checks."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tgi_cli.launcher.health_probe import HEALTH, HealthProbe


@contextmanager
def answering(answer: bytes | None) -> Iterator[tuple[HealthProbe, list[bytes]]]:
    """A server that answers one request, or keeps its client waiting; with what it has read."""
    read: list[bytes] = []
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                read.append(connection.recv(4096))
                if answer is None:
                    done.wait(60)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield HealthProbe("127.0.0.1", listener.getsockname()[1], timeout=20), read
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nmore than is read", 503),
        (b"HTTP/1.0 404\r\n\r\n", 404),
        (b"", None),
        (b"SSH-2.0-OpenSSH_9.2\r\n", None),
        (b"HTTP/1.1 2000 OK\r\n\r\n", None),
        (b"x" * 100_000, None),
    ],
)
def test_the_status_line_decides(answer: bytes, status: int | None) -> None:
    with answering(answer) as (probe, read):
        assert probe.ask(f"{HEALTH}?replica=1") == status
    assert read[0].startswith(b"GET /health?replica=1 HTTP/1.1\r\n")
    assert read[0].endswith(b"\r\n\r\n")


def test_a_server_that_does_not_answer_or_listen() -> None:
    with answering(None) as (probe, _):
        assert HealthProbe(probe.host, probe.port, timeout=0.2).ask(HEALTH) is None
    assert probe.ask(HEALTH) is None


def test_a_launcher_imports_nothing_heavy() -> None:
    code = """
import sys
import tgi_cli.launcher.serve
print(*sorted({"torch", "numpy", "asyncio"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
