"""A model server that is stopped and started on the router's request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from tgi_cli.errors import ShardError
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.launcher.server_sleep import ServerSleep, SleepPhase
from tgi_cli.process.control_channel import (
    Command,
    CommandMessage,
    ControlChannel,
    Outcome,
    OutcomeMessage,
    decode_outcome,
    encode_line,
)

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


@pytest.fixture
def server() -> Iterator[ChildProcess]:
    child = ChildProcess("model server", ShardError, SLEEPS)
    yield child
    child.kill()
    child.wait()


def test_commands_arrive_until_the_router_is_gone(channel: ControlChannel, router: Router) -> None:
    commands: SimpleQueue[Command] = SimpleQueue()
    channel.listen(commands.put)
    router.send(Command.SLEEP)
    router.send(Command.WAKE)
    assert [commands.get(timeout=20) for _ in range(2)] == [Command.SLEEP, Command.WAKE]
    (reader,) = [one for one in threading.enumerate() if one.name == "control"]
    router.close()
    reader.join(20)
    assert not reader.is_alive()
    channel.reply(Outcome.REFUSED, "nobody reads it")


def test_stop_and_start(channel: ControlChannel, router: Router, server: ChildProcess) -> None:
    sleep = ServerSleep(channel)
    sleep.stop(server)
    assert sleep.phase is SleepPhase.STOPPING
    server.wait()
    assert sleep.ended(lambda: "the model server was killed by SIGTERM")
    assert router.receive() == OutcomeMessage(Outcome.ASLEEP)
    assert sleep.wake()
    assert sleep.woken()
    assert sleep.phase is SleepPhase.AWAKE
    assert not sleep.woken(), "it has not slept again"
    assert not sleep.ended(lambda: "it crashed"), "that is the supervisor's to handle"


def test_a_server_that_fails_to_start_sleeps_on(channel: ControlChannel, router: Router) -> None:
    sleep = ServerSleep(channel)
    sleep.phase = SleepPhase.ASLEEP
    for _ in range(2):
        assert sleep.wake()
        assert sleep.ended(lambda: "out of memory")
        assert router.receive() == OutcomeMessage(Outcome.ASLEEP, "out of memory")
        assert sleep.phase is SleepPhase.ASLEEP


def test_what_cannot_be_done_is_refused(channel: ControlChannel, router: Router) -> None:
    sleep = ServerSleep(channel)
    assert not sleep.wake()
    assert router.receive().outcome is Outcome.REFUSED
    sleep.stop(None)
    assert router.receive() == OutcomeMessage(
        Outcome.REFUSED, "the model server does not serve at the moment"
    )
    assert sleep.phase is SleepPhase.AWAKE


def test_messages_are_lines_of_json() -> None:
    line = encode_line(OutcomeMessage(Outcome.ASLEEP, "a\ncause"))
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"outcome": "asleep", "cause": "a\ncause"}
    assert decode_outcome(line) == OutcomeMessage(Outcome.ASLEEP, "a\ncause")
