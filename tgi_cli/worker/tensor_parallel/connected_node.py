"""Another node of a model, as node 0 sees it."""

from __future__ import annotations

from contextlib import suppress

from tgi_cli.errors import ShardError
from tgi_cli.process.authenticated_channel import AuthenticatedChannel
from tgi_cli.worker.tensor_parallel.end_errors import status_error
from tgi_cli.worker.tensor_parallel.node_messages import (
    NodePing,
    ProcessEnded,
    decode_news,
    encode_node_message,
)

_MESSAGE_SECONDS = 5.0
"""Time limit for the rest of a message, which has a few bytes."""
_PING = encode_node_message(NodePing())


class ConnectedNode:
    """A node that was admitted, and the connection to its ``tgi serve``.

    Its messages are received by one thread.

    Attributes:
        name: in messages.
        unanswered: pings since its last answer.
    """

    def __init__(self, rank: int, channel: AuthenticatedChannel) -> None:
        self.rank = rank
        self.channel = channel
        self.name = f"node {rank} ({channel.other_address})"
        self.unanswered = 0
        self._statuses: dict[int, int] = {}
        channel.set_timeout(_MESSAGE_SECONDS)

    def ping(self) -> None:
        """Send a ping and count it."""
        self.unanswered += 1
        with suppress(OSError):  # it is gone: the end of its channel shows it
            self.channel.send(_PING)

    def receive(self) -> NodePing | ProcessEnded | None:
        """Receive the next message, or None if the node is gone.

        Raises:
            OSError, ValueError: the message is incomplete or invalid.
        """
        message = self.channel.receive()
        if message is None:
            return None
        news = decode_news(message)
        if isinstance(news, ProcessEnded):
            self._statuses[news.process] = news.status
        else:
            self.unanswered = 0
        return news

    def await_status_of(self, process: int, seconds: float) -> None:
        """Wait for the report that a process has ended, which may not come."""
        with suppress(OSError, ValueError):
            self.channel.set_timeout(seconds)
            while process not in self._statuses and self.receive() is not None:
                pass

    def process_error(self, process: int, name: str) -> ShardError:
        """The error of one of its processes that has ended."""
        see = f"see the log of {self.name}"
        status = self._statuses.get(process)
        return (
            ShardError(f"{name} is gone", see)
            if status is None
            else status_error(name, status, see)
        )

    def lost_error(self) -> ShardError:
        """The error to raise when its channel has ended."""
        return ShardError(f"{self.name} is gone", "see its log, and whether it can be reached")
