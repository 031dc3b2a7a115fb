"""The process of another shard, as shard 0 sees it: its start, its channels, its end."""

from __future__ import annotations

import signal
import socket
import subprocess

from tgi_cli.errors import ShardError
from tgi_cli.process.framing import Channel
from tgi_cli.process.spawn import child_environment, module_command
from tgi_cli.worker.tensor_parallel import messages

PROGRAM = module_command("tgi_cli.worker.tensor_parallel.main")

_PING = messages.encode(messages.Ping())
_EVENT_SECONDS = 5.0
"""That a message of a few bytes may take once it has begun."""
_REAP_SECONDS = 2.0
"""Between the end of a process's sockets and its own."""

_WHY: dict[int, str] = {
    signal.SIGKILL: "if nobody did that, the system was out of memory: see its log, and try a "
    "smaller model or cache (--max-batch-total-tokens)",
}


class ShardProcess:
    """Shard ``rank``, started.

    Attributes:
        commands: what all shards execute, in order.
        events: pings, and what the shard reports.
        loaded: whether it said that its weights are in place.
        unanswered: pings since its last answer.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loaded = False
        self.unanswered = 0
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        self.commands, self.events = Channel(ours[0]), Channel(ours[1])
        ours[1].settimeout(_EVENT_SECONDS)
        with theirs[0], theirs[1]:
            fds = [connection.fileno() for connection in theirs]
            self._process = subprocess.Popen(
                [*PROGRAM, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=child_environment(),
            )

    def ping(self) -> None:
        """Ask whether it runs; ``unanswered`` is for who asks to keep."""
        try:
            self.events.send(_PING)
        except OSError:
            return  # it is gone: the end of its events channel shows it

    def kill(self) -> None:
        self._process.kill()

    def dismiss(self) -> None:
        """Tell it to end."""
        self.commands.shut()
        self.events.shut()

    def collect(self, seconds: float) -> None:
        """Wait for its end, and kill it when the time is up."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """After its end: close what is left of it here."""
        self.commands.close()
        self.events.close()

    def ended(self) -> ShardError:
        """Why its sockets have closed."""
        see = "see its log above"
        try:
            status = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return ShardError(f"shard {self.rank} has closed its connection", see)
        if status >= 0:
            return ShardError(f"shard {self.rank} ended with status {status}", see)
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return ShardError(f"shard {self.rank} was killed by {name}", _WHY.get(-status, see))
