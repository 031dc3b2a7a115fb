"""One client of the model server: its live requests, and what waits to be sent to it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from tgi_cli.engine.messages import StepOutputs
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb


class ClientSession:
    """The server's lock guards all fields but ``outgoing``.

    Attributes:
        outgoing: outputs under the client's ids; None: the end.
        live: client's id -> engine's id.
        half_closed: the client submits nothing more; the stream ends with its last request.
        closed: the call is over; what its reader still finds is not for the engine.
        steps: where its messages go; None: they go by gRPC.
    """

    def __init__(self) -> None:
        self.outgoing: SimpleQueue[StepOutputs | None] = SimpleQueue()
        self.live: dict[int, int] = {}
        self.half_closed = False
        self.closed = False
        self.steps: socket.socket | None = None

    def messages(self) -> Iterator[pb.StepMessage]:
        """A message for whatever has gathered, in order, until the end."""
        while (outputs := self.outgoing.get()) is not None:
            more: StepOutputs | None = outputs
            try:
                while (more := self.outgoing.get_nowait()) is not None:
                    codec.merge_steps(outputs, more)
            except Empty:
                pass
            yield codec.encode_step(outputs)
            if more is None:
                return

    def use(self, connection: socket.socket | None) -> None:
        """Send messages there; a session that is over already closes it."""
        if connection is not None and self.closed:
            connection.close()
        else:
            self.steps = connection

    def close(self) -> list[int]:
        """The call is over; returns the engine's ids of what the client held."""
        self.closed = True
        if self.steps is not None:
            with contextlib.suppress(OSError):  # closed already
                self.steps.shutdown(socket.SHUT_RDWR)  # its writer may be waiting in it
        orphans = list(self.live.values())
        self.live.clear()
        return orphans
