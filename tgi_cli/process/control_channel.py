"""The channel on which a router has its launcher stop and start the model server.

A pair of connected sockets, of which the router inherits one. Each message is a JSON object on a
line of its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Command(StrEnum):
    """What a router asks of its launcher."""

    SLEEP = "sleep"
    """Stop the model server, which has no requests."""
    WAKE = "wake"
    """Start it again."""


class Outcome(StrEnum):
    """What became of a command. A model server that was started shows it by serving."""

    ASLEEP = "asleep"
    """The model server has ended: as it was asked to, or, with a cause, while it started."""
    REFUSED = "refused"
    """The command was not carried out."""


@dataclass(frozen=True, slots=True)
class CommandMessage:
    """From the router."""

    command: Command


@dataclass(frozen=True, slots=True)
class OutcomeMessage:
    """From the launcher; ``cause`` is empty if nothing went wrong."""

    outcome: Outcome
    cause: str = ""


def encode_line(message: CommandMessage | OutcomeMessage) -> bytes:
    """Return a message as a line."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_outcome(line: bytes) -> OutcomeMessage:
    """Read a line of the launcher."""
    fields = json.loads(line)
    return OutcomeMessage(Outcome(fields["outcome"]), fields["cause"])


class ControlChannel:
    """The launcher's end, and the router's until it has inherited it."""

    def __init__(self) -> None:
        self._own, self._routers = socket.socketpair()

    @property
    def router_fd(self) -> int:
        """The descriptor that the router inherits."""
        return self._routers.fileno()

    def close_router_fd(self) -> None:
        """Close the router's end in this process, once the router has it."""
        self._routers.close()

    def listen(self, on_command: Callable[[Command], None]) -> None:
        """Call ``on_command`` in a thread with each command, until the router is gone."""
        threading.Thread(target=self._read, args=(on_command,), name="control", daemon=True).start()

    def reply(self, outcome: Outcome, cause: str = "") -> None:
        """Send the outcome of a command; nothing happens if the router is gone."""
        with contextlib.suppress(OSError):
            self._own.sendall(encode_line(OutcomeMessage(outcome, cause)))

    def close(self) -> None:
        """Close both ends."""
        with contextlib.suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._own.close()
        self._routers.close()

    def _read(self, on_command: Callable[[Command], None]) -> None:
        with contextlib.suppress(OSError), self._own.makefile("rb") as lines:
            for line in lines:
                on_command(Command(json.loads(line)["command"]))
