"""The router's end of the channel to its launcher."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from tgi_cli.process.control_channel import (
    Command,
    CommandMessage,
    OutcomeMessage,
    decode_outcome,
    encode_line,
)


class LauncherConnection(asyncio.Protocol):
    """Sends commands and receives their outcomes. Make it with :meth:`open`."""

    def __init__(self, on_outcome: Callable[[OutcomeMessage], None]) -> None:
        self._on_outcome = on_outcome
        self._transport: asyncio.WriteTransport | None = None
        self._rest = b""

    @classmethod
    async def open(
        cls, fd: int, on_outcome: Callable[[OutcomeMessage], None]
    ) -> LauncherConnection:
        """Use the inherited descriptor; ``on_outcome`` is called in the event loop."""
        loop = asyncio.get_running_loop()
        connected = socket.socket(fileno=fd)
        connected.setblocking(False)
        connected.set_inheritable(False)
        _, connection = await loop.create_unix_connection(lambda: cls(on_outcome), sock=connected)
        return connection

    def send(self, command: Command) -> None:
        """Send a command. The launcher's end is not noticed here: it ends this process too."""
        if self._transport is not None:
            self._transport.write(encode_line(CommandMessage(command)))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's has another base

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_outcome(decode_outcome(line))
