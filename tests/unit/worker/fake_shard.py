"""A shard's process without a model: behaves as its first argument says. Imports no torch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from tgi_cli.process.framing import Channel
from tgi_cli.worker.tensor_parallel import messages


def main(behaviour: str, commands_fd: str, events_fd: str) -> None:
    commands, events = (Channel(socket.socket(fileno=int(fd))) for fd in (commands_fd, events_fd))
    behave(behaviour, 1, commands, events)


def behave(behaviour: str, number: int, commands: Channel, events: Channel) -> None:
    """Be process ``number``."""
    first = commands.receive()
    assert first is not None
    assert messages.decode_assignment(first).process == number
    if behaviour == "deaf":
        events.send(messages.encode(messages.Loaded()))
        time.sleep(600)
    if behaviour == "refuses":
        events.send(
            messages.encode(messages.Failed("CheckpointError", "3 missing: a, b, c", "mend it"))
        )
    if behaviour == "babbles":
        events.send(b"\xc1\xc1\xc1")
    if behaviour in ("refuses", "babbles", "dies at the start"):
        time.sleep(0.5)
        os._exit(3)
    events.send(messages.encode(messages.Loaded()))

    def answer() -> None:
        while (ping := events.receive()) is not None:
            events.send(ping)
        os._exit(0)

    if behaviour == "hangs":
        time.sleep(600)
    threading.Thread(target=answer, daemon=True).start()
    while (data := commands.receive()) is not None:
        command = messages.decode_command(data)
        if isinstance(command, messages.RunStep):
            if behaviour == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour == "fails":
                events.send(
                    messages.encode(messages.Failed("OutOfMemoryError", "no memory left", "buy"))
                )
                os._exit(7)
        elif isinstance(command, messages.PrepareAdapter):
            cause = "rank 64 is too much" if command.name == "large" else ""
            events.send(messages.encode(messages.AdapterPrepared(command.adapter_id, cause)))
    time.sleep(600)  # its other thread ends it


if __name__ == "__main__":
    main(*sys.argv[1:])
