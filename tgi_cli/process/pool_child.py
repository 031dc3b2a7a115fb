"""One child process of :mod:`tgi_cli.process.worker_pool`, and its messages."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from tgi_cli.process.framing import Message, frame_parts, split_frame
from tgi_cli.process.spawn import child_environment, module_command

T = TypeVar("T")

_PIECE = 256 << 10


class PoolChild:
    """A process that runs a module of this package; used by one thread or task at a time.

    It ends when its input does, which is with this process.

    Args:
        module: Its main module.
        environment: Its variables, besides this process's.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                module_command(module),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=child_environment() | dict(environment),
                # Ctrl-C on the terminal is the router's to handle, which ends the child then.
                start_new_session=True,
            )
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._popen.poll() is None

    def exchange(self, body: Message, seconds: float) -> dict[str, Any]:
        """Send a message and return the answer. Blocks.

        If buffers follow the answer, their bytes are its item ``data``.

        Raises TimeoutError, and OSError or EOFError when the process is gone.
        """
        until = time.monotonic() + seconds
        for part in frame_parts(body):
            left = memoryview(part)
            while left:
                self._wait(select.POLLOUT, until)
                left = left[self._socket.send(left) :]
        received = bytearray()
        while (frame := split_frame(received)) is None:
            self._wait(select.POLLIN, until)
            received += _unless_closed(self._socket.recv(_PIECE))
        answer: dict[str, Any] = json.loads(frame[0])
        left = _begin_data(answer, frame[1])
        while left:
            self._wait(select.POLLIN, until)
            left = left[_unless_closed(self._socket.recv_into(left)) :]
        return answer

    async def exchange_async(self, body: Message, seconds: float) -> dict[str, Any]:
        """As :meth:`exchange`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            for part in frame_parts(body):
                await loop.sock_sendall(self._socket, part)
            received = bytearray()
            while (frame := split_frame(received)) is None:
                received += _unless_closed(await loop.sock_recv(self._socket, _PIECE))
            answer: dict[str, Any]
            if len(frame[0]) > _PIECE:
                answer = await asyncio.to_thread(json.loads, frame[0])
            else:
                answer = json.loads(frame[0])
            left = _begin_data(answer, frame[1])
            while left:
                left = left[_unless_closed(await loop.sock_recv_into(self._socket, left)) :]
        return answer

    def _wait(self, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), event)
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1e3):
            raise TimeoutError

    def kill(self) -> None:
        """Kill it, from any thread; a thread that waits for its answer sees that it is gone."""
        self._popen.kill()
        self._popen.wait()

    def end(self, seconds: float = 0.0) -> int:
        """Wait for its end and return its exit code; for its user alone.

        The code is below 0 for a signal. It is killed if it does not end within ``seconds``.
        """
        try:
            code = self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        self._socket.close()
        return code


def _begin_data(answer: dict[str, Any], received: bytes) -> memoryview:
    """Add the item ``data`` to an answer that buffers follow; return the part to be received."""
    size = answer.get("bytes", 0)
    if not size:
        return memoryview(b"")
    data = bytearray(size)
    data[: len(received)] = received
    answer["data"] = data
    return memoryview(data)[len(received) :]


def _unless_closed(received: T) -> T:
    """What was received, or how much. Raises EOFError at the end."""
    if not received:
        raise EOFError
    return received
