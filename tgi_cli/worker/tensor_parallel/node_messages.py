"""Messages between node 0 and the other nodes of a model, as JSON: the first ones have to be
understood by other versions.

Every connection begins with what the other end is: a node, whose connection carries its news, or
one of the two channels of a process (:mod:`tgi_cli.worker.tensor_parallel.messages`).
"""

from __future__ import annotations

from typing import Any

import msgspec


class JoinNode(msgspec.Struct, frozen=True, tag="node"):
    """A node asks to run processes of a model. What node 0 has itself must be the same.

    Attributes:
        version: Of this package.
        torch: Of PyTorch.
        rank: The node's number.
        revision: Of the model, or empty.
        files: The model's files, each with what identifies its content.
        settings: Those that all nodes must be given, by name.
    """

    version: str
    torch: str
    rank: int
    revision: str
    files: dict[str, str]
    settings: dict[str, Any]


class JoinProcess(msgspec.Struct, frozen=True, tag="process"):
    """A channel of a process: ``channel`` is ``commands`` or ``events``; ``run`` as admitted."""

    run: str
    process: int
    channel: str


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The node is to start these processes, which join the run of this name."""

    run: str
    processes: list[int]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The node cannot join, for a reason and with a remedy as in a TgiError."""

    cause: str
    remedy: str


class NodePing(msgspec.Struct, frozen=True, tag="ping"):
    """From node 0, every second; a node that runs sends it back."""


class ProcessEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A process of the node has ended, with the status of :class:`subprocess.Popen`."""

    process: int
    status: int


encode_node_message = msgspec.json.Encoder().encode

_join_decoder: msgspec.json.Decoder[JoinNode | JoinProcess] = msgspec.json.Decoder(
    JoinNode | JoinProcess
)
_answer_decoder: msgspec.json.Decoder[Admitted | Refused | NodePing] = msgspec.json.Decoder(
    Admitted | Refused | NodePing
)
_news_decoder: msgspec.json.Decoder[NodePing | ProcessEnded] = msgspec.json.Decoder(
    NodePing | ProcessEnded
)

# They raise msgspec.DecodeError for invalid messages.
decode_join = _join_decoder.decode
decode_answer = _answer_decoder.decode
decode_news = _news_decoder.decode


def version_of(message: bytes) -> str | None:
    """The version that a node names whose message may be of another version, or None."""
    try:
        found = msgspec.json.decode(message)
    except msgspec.DecodeError:
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, str) else None
