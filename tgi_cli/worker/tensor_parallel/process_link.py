"""How a process of another node reaches node 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tgi_cli.process.authenticated_channel import AuthenticatedChannel, connect
from tgi_cli.worker.tensor_parallel.node_messages import JoinProcess, encode_node_message

CONNECT_SECONDS = 10.0
"""Time limit to connect and authenticate."""


@dataclass(frozen=True, slots=True)
class ProcessLink:
    """What a node gives to a process that it starts, through a file without a name.

    Attributes:
        host, port: of node 0.
        secret: by which the nodes authenticate each other.
        run, process: as node 0 has admitted them.
        model_path: the model's folder on this node.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    run: str
    process: int
    model_path: Path

    def connect(self, channel: str) -> AuthenticatedChannel:
        """Open one of the process's two channels.

        Raises:
            AuthenticationError: what listens there does not know the secret.
            OSError: node 0 cannot be reached.
        """
        connected = connect(self.host, self.port, self.secret, CONNECT_SECONDS)
        if channel == "commands":
            connected.limit = None  # steps have the pixels of images
        connected.send(encode_node_message(JoinProcess(self.run, self.process, channel)))
        return connected
