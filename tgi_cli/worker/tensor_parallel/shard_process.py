"""The process of another shard, as shard 0 controls it: its start, its channels, its end."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress

from tgi_cli.errors import ShardError
from tgi_cli.process.framing import Channel
from tgi_cli.process.spawn import child_environment, module_command
from tgi_cli.worker.tensor_parallel import messages
from tgi_cli.worker.tensor_parallel.connected_node import ConnectedNode
from tgi_cli.worker.tensor_parallel.end_errors import SEE_LOG, status_error

COMMAND = module_command("tgi_cli.worker.tensor_parallel.main")

_PING = messages.encode(messages.Ping())
_EVENT_SECONDS = 5.0
"""Time limit for the rest of an event, which has a few bytes."""
_REAP_SECONDS = 2.0
"""Time limit between the end of a process's sockets and its own."""


class ShardProcess:
    """Process ``number`` of a model, which messages call ``name``.

    Attributes:
        commands: the channel of commands, which all shards execute in order.
        events: the channel of pings, and of what the shard reports.
        loaded: whether the shard has loaded its weights.
        unanswered: pings since its last answer.
    """

    def __init__(self, number: int, name: str, commands: Channel, events: Channel) -> None:
        self.number = number
        self.name = name
        self.commands = commands
        self.events = events
        self.loaded = False
        self.unanswered = 0

    def ping(self) -> None:
        """Send a ping and count it."""
        self.unanswered += 1
        with suppress(OSError):  # it is gone: the end of its events channel shows it
            self.events.send(_PING)

    def stop(self) -> None:
        """Make it end: shut its channels."""
        self.commands.shut()
        self.events.shut()

    def kill(self) -> None:
        """End it at once."""
        raise NotImplementedError

    def wait(self, seconds: float) -> None:
        """Wait for its end, and kill it when the time is up."""
        raise NotImplementedError

    def close(self) -> None:
        """Close its channels, after its end."""
        self.commands.close()
        self.events.close()

    def end_error(self) -> ShardError:
        """The error that explains why its sockets have closed."""
        raise NotImplementedError


class LocalShardProcess(ShardProcess):
    """A child of this process, which it starts.

    Attributes:
        popen: the process.
    """

    def __init__(self, number: int, name: str) -> None:
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        super().__init__(number, name, *map(Channel, ours))
        ours[1].settimeout(_EVENT_SECONDS)
        with theirs[0], theirs[1]:
            fds = [connection.fileno() for connection in theirs]
            self.popen = subprocess.Popen(
                [*COMMAND, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=child_environment(),
            )

    def kill(self) -> None:
        self.popen.kill()

    def wait(self, seconds: float) -> None:
        try:
            self.popen.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def end_error(self) -> ShardError:
        try:
            status = self.popen.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return ShardError(f"{self.name} has closed its connection", SEE_LOG)
        return status_error(self.name, status, SEE_LOG)


class RemoteShardProcess(ShardProcess):
    """A process on another node, whose ``tgi serve`` has started it and ends it.

    Args:
        node: where it is.
    """

    def __init__(
        self, number: int, name: str, commands: Channel, events: Channel, node: ConnectedNode
    ) -> None:
        super().__init__(number, name, commands, events)
        self._node = node

    def kill(self) -> None:
        """End it, with the others of its node, once that has received it."""
        self.stop()
        self._node.channel.shut()

    def wait(self, seconds: float) -> None:
        """Its node waits for its end."""

    def end_error(self) -> ShardError:
        self._node.await_status_of(self.number, _REAP_SECONDS)
        return self._node.process_error(self.number, self.name)
