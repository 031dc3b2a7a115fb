"""One client of the model server: its live requests and its outgoing messages."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from tgi_cli.engine.messages import StepOutputs
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.image_codec import ReceivedImages


class ClientSession:
    """The state of one Session call. The server's lock guards all fields but ``outgoing``
    and ``images``, which is the reader's.

    Attributes:
        outgoing: Outputs under the client's ids; None ends the stream.
        live: The engine's id of each live request by the client's id.
        half_closed: Whether the client submits no more; the stream ends with its last request.
        closed: Whether the call has ended; further requests of its reader are dropped.
        steps: Socket for its step messages, or None to send them by gRPC.
        images: Those that its client has sent for the next requests.
    """

    def __init__(self) -> None:
        self.outgoing: SimpleQueue[StepOutputs | None] = SimpleQueue()
        self.live: dict[int, int] = {}
        self.half_closed = False
        self.closed = False
        self.steps: socket.socket | None = None
        self.images = ReceivedImages()

    def messages(self) -> Iterator[pb.StepMessage]:
        """Yield one message for all outputs that are queued, in order, until the end."""
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
        """Send step messages to a socket, which a closed session closes."""
        if connection is not None and self.closed:
            connection.close()
        else:
            self.steps = connection

    def close(self) -> list[int]:
        """End the session; return the engine's ids of its live requests."""
        self.closed = True
        if self.steps is not None:
            with contextlib.suppress(OSError):  # closed already
                self.steps.shutdown(socket.SHUT_RDWR)  # its writer may be blocked in it
        orphans = list(self.live.values())
        self.live.clear()
        return orphans
