"""A model server that is stopped and started on the router's request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from tgi_cli.errors import ShardError
from tgi_cli.launcher.backoff import Restarts
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.launcher.model_server import Ended, ModelServerParts, ModelServerSupervisor, Serving
from tgi_cli.launcher.server_sleep import ServerSleep, SleepPhase
from tgi_cli.launcher.watchdog import Watchdog
from tgi_cli.process.control_channel import (
    Command,
    CommandMessage,
    ControlChannel,
    Outcome,
    OutcomeMessage,
    decode_outcome,
    encode_line,
)
from tgi_cli.process.heartbeat import SharedHeartbeat

SLEEPS = ["/bin/sleep", "60"]


class Router:
    """The router's end of a channel."""

    def __init__(self, channel: ControlChannel) -> None:
        self._socket = socket.socket(fileno=socket.dup(channel.router_fd))
        channel.close_router_fd()
        self._lines = self._socket.makefile("rb")

    def send(self, command: Command) -> None:
        self._socket.sendall(encode_line(CommandMessage(command)))

    def receive(self) -> OutcomeMessage:
        return decode_outcome(self._lines.readline())

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def channel() -> Iterator[ControlChannel]:
    channel = ControlChannel()
    yield channel
    channel.close()


@pytest.fixture
def router(channel: ControlChannel) -> Iterator[Router]:
    router = Router(channel)
    yield router
    router.close()


class FakeServers:
    """Model servers that run /bin/sleep."""

    def __init__(self, count: int) -> None:
        self.events: SimpleQueue[Ended | Serving] = SimpleQueue()
        self.all = [
            ModelServerSupervisor(
                ModelServerParts(start=self._start, usable=lambda: False),
                grace=20.0,
                restarts=Restarts(0),
                watchdog=Watchdog(0.0, threading.Event()),
                post=self.events.put,
            )
            for _ in range(count)
        ]
        for server in self.all:
            server.start()
            server.has_served()

    def next_ended(self) -> ModelServerSupervisor:
        """Wait for one to end."""
        event = self.events.get(timeout=60)
        return next(server for server in self.all if server.child is event.child)

    @staticmethod
    def _start() -> tuple[ChildProcess, SharedHeartbeat]:
        heartbeat = SharedHeartbeat.create()
        child = ChildProcess("model server", ShardError, SLEEPS)
        heartbeat.close_fd()
        return child, heartbeat


@pytest.fixture
def servers() -> Iterator[FakeServers]:
    servers = FakeServers(2)
    yield servers
    for server in servers.all:
        server.close()
        assert server.child is not None
        server.child.kill()
        server.child.wait()


def test_commands_arrive_until_the_router_is_gone(channel: ControlChannel, router: Router) -> None:
    commands: SimpleQueue[Command] = SimpleQueue()
    channel.listen(commands.put)
    router.send(Command.SLEEP)
    router.send(Command.WAKE)
    assert [commands.get(timeout=60) for _ in range(2)] == [Command.SLEEP, Command.WAKE]
    (reader,) = [one for one in threading.enumerate() if one.name == "control"]
    router.close()
    reader.join(60)
    assert not reader.is_alive()
    channel.reply(Outcome.REFUSED, "nobody reads it")


def test_stop_and_start(channel: ControlChannel, router: Router, servers: FakeServers) -> None:
    sleep = ServerSleep(channel)
    sleep.run(Command.SLEEP, servers.all)
    assert sleep.phase is SleepPhase.STOPPING
    for _ in servers.all:
        assert sleep.has_ended(servers.next_ended(), servers.all)
    assert sleep.phase is SleepPhase.ASLEEP
    assert router.receive() == OutcomeMessage(Outcome.ASLEEP)
    sleep.run(Command.WAKE, servers.all)
    for server in servers.all:
        server.has_served()
        assert sleep.phase is SleepPhase.WAKING, "all have to serve"
        sleep.has_served(servers.all)
    assert sleep.phase is SleepPhase.AWAKE
    assert not sleep.has_ended(servers.all[0], servers.all), "that is the supervisor's to handle"


def test_a_server_that_fails_to_start_sleeps_on(
    channel: ControlChannel, router: Router, servers: FakeServers
) -> None:
    sleep = ServerSleep(channel)
    sleep.run(Command.SLEEP, servers.all)
    for _ in servers.all:
        sleep.has_ended(servers.next_ended(), servers.all)
    assert not router.receive().cause
    for _ in range(2):
        sleep.run(Command.WAKE, servers.all)
        assert servers.all[1].child is not None
        servers.all[1].child.kill()
        for _ in servers.all:
            assert sleep.has_ended(servers.next_ended(), servers.all)
        assert "killed by SIGKILL" in router.receive().cause
        assert sleep.phase is SleepPhase.ASLEEP


def test_what_cannot_be_done_is_refused(
    channel: ControlChannel, router: Router, servers: FakeServers
) -> None:
    sleep = ServerSleep(channel)
    sleep.run(Command.WAKE, servers.all)
    assert router.receive() == OutcomeMessage(Outcome.REFUSED, "the model server is not asleep")
    servers.all[0].restart()
    sleep.run(Command.SLEEP, servers.all)
    assert router.receive() == OutcomeMessage(
        Outcome.REFUSED, "the model server does not serve at the moment"
    )
    assert sleep.phase is SleepPhase.AWAKE


def test_messages_are_lines_of_json() -> None:
    line = encode_line(OutcomeMessage(Outcome.ASLEEP, "a\ncause"))
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"outcome": "asleep", "cause": "a\ncause"}
    assert decode_outcome(line) == OutcomeMessage(Outcome.ASLEEP, "a\ncause")
