"""The model server of a replica, with small processes in its role."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from tests.tools.server_process import kill, poll
from tgi_cli.config import ServeConfig
from tgi_cli.errors import ShardError, TgiError
from tgi_cli.launcher import backoff
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.launcher.model_server import ModelServerParts, Phase
from tgi_cli.process.heartbeat import SharedHeartbeat
from tgi_cli.ray_serve.replica_server import ReplicaServer

LIVES = """
    import signal, sys, time
    from tgi_cli.process.heartbeat import HeartbeatWriter, SharedHeartbeat
    class Engine:
        progress = live_requests = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with HeartbeatWriter(SharedHeartbeat.attach(FD)).beating() as writer:
        writer.watch(Engine, 0.0)
        time.sleep(60)
"""


class Server:
    """A replica's server, the lives of its process, and what it reports."""

    def __init__(self, restarts: int, script: str, usable: bool) -> None:
        self.lives: list[ChildProcess] = []
        self.failures: SimpleQueue[TgiError] = SimpleQueue()
        self._script = script
        self._is_usable = usable
        serve = ServeConfig(model_id="m", max_restarts=restarts, watchdog_timeout=0.0)
        parts = ModelServerParts(start=self._start, usable=self._usable)
        self.server = ReplicaServer(parts, serve, self.failures.put)

    def _start(self) -> tuple[ChildProcess, SharedHeartbeat]:
        heartbeat = SharedHeartbeat.create()
        script = f"FD = {heartbeat.fd}\n" + textwrap.dedent(self._script)
        command = [sys.executable, "-c", script]
        child = ChildProcess("model server", ShardError, command, [heartbeat.fd])
        heartbeat.close_fd()
        self.lives.append(child)
        return child, heartbeat

    def serves(self, life: int) -> bool:
        """Whether its supervisor knows that this process serves."""
        return len(self.lives) == life and self.server._server.phase is Phase.SERVING

    def _usable(self) -> bool:
        return self._is_usable


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 0.02)
    started: list[Server] = []
    yield started
    for server in started:
        for child in server.lives:
            kill(child.pid)


def start(servers: list[Server], restarts: int, script: str = LIVES, usable: bool = True) -> Server:
    server = Server(restarts, script, usable)
    servers.append(server)
    server.server.start()
    return server


def test_it_is_restarted_when_it_dies_and_ends_when_it_should(servers: list[Server]) -> None:
    server = start(servers, restarts=3)
    for life in (1, 2):
        poll(lambda life=life: server.serves(life), 60, "it serves")  # type: ignore[misc]
        if life == 1:
            server.lives[0].kill()
    server.server.stop()
    assert len(server.lives) == 2
    assert not server.lives[1].running
    assert server.failures.empty()


def test_dying_too_often_is_a_failure(servers: list[Server]) -> None:
    server = start(servers, restarts=1)
    for life in (1, 2):
        poll(lambda life=life: server.serves(life), 60, "it serves")  # type: ignore[misc]
        server.lives[-1].kill()
    error = server.failures.get(timeout=60)
    assert isinstance(error, ShardError)
    assert "SIGKILL" in error.cause
    server.server.stop()
    assert len(server.lives) == 2


def test_dying_before_it_serves_is_a_failure(servers: list[Server]) -> None:
    server = start(servers, restarts=3, script="import sys; sys.exit(4)", usable=False)
    error = server.failures.get(timeout=60)
    assert "ended with code 4" in error.cause
    server.server.stop()
    assert len(server.lives) == 1
