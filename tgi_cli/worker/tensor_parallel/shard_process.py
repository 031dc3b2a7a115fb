"""The process of another shard, as shard 0 controls it: its start, its channels, its end."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import suppress

from tgi_cli.errors import ShardError
from tgi_cli.process.framing import Channel
from tgi_cli.process.spawn import child_environment, module_command
from tgi_cli.worker.tensor_parallel import messages

COMMAND = module_command("tgi_cli.worker.tensor_parallel.main")

_PING = messages.encode(messages.Ping())
_EVENT_SECONDS = 5.0
"""Time limit for the rest of an event, which has a few bytes."""
_REAP_SECONDS = 2.0
"""Time limit between the end of a process's sockets and its own."""

_WHY: dict[int, str] = {
    signal.SIGKILL: "unless a user did that, the system was out of memory: see its log, and try "
    "a smaller model or cache (--max-batch-total-tokens)",
}


class ShardProcess:
    """Starts process ``number`` of a model, which messages call ``name``.

    Attributes:
        popen: the process.
        commands: the channel of commands, which all shards execute in order.
        events: the channel of pings, and of what the shard reports.
        loaded: whether the shard has loaded its weights.
        unanswered: pings since its last answer.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.loaded = False
        self.unanswered = 0
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        self.commands, self.events = Channel(ours[0]), Channel(ours[1])
        ours[1].settimeout(_EVENT_SECONDS)
        with theirs[0], theirs[1]:
            fds = [connection.fileno() for connection in theirs]
            self.popen = subprocess.Popen(
                [*COMMAND, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=child_environment(),
            )

    def ping(self) -> None:
        """Send a ping and count it."""
        self.unanswered += 1
        with suppress(OSError):  # it is gone: the end of its events channel shows it
            self.events.send(_PING)

    def stop(self) -> None:
        """Make it end: shut its channels."""
        self.commands.shut()
        self.events.shut()

    def wait(self, seconds: float) -> None:
        """Wait for its end, and kill it when the time is up."""
        try:
            self.popen.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def close(self) -> None:
        """Close its channels, after its end."""
        self.commands.close()
        self.events.close()

    def end_error(self) -> ShardError:
        """The error that explains why its sockets have closed."""
        see = "see its log above"
        try:
            status = self.popen.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return ShardError(f"{self.name} has closed its connection", see)
        if status >= 0:
            return ShardError(f"{self.name} ended with status {status}", see)
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return ShardError(f"{self.name} was killed by {name}", _WHY.get(-status, see))
