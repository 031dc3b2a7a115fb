"""One child process of :mod:`tgi_cli.process.worker_pool`, and its messages."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from tgi_cli.process.framing import FrameDecoder, encode_frame
from tgi_cli.process.spawn import child_environment, module_command

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

    def exchange(self, body: bytes, seconds: float) -> dict[str, Any]:
        """Send a message and return the answer. Blocks.

        Raises TimeoutError, and OSError or EOFError when the process is gone.
        """
        until = time.monotonic() + seconds
        left = memoryview(encode_frame(body))
        while left:
            self._wait(select.POLLOUT, until)
            left = left[self._socket.send(left) :]
        decoder = FrameDecoder()
        messages: list[bytes] = []
        while not messages:
            self._wait(select.POLLIN, until)
            messages = decoder.feed(_unless_closed(self._socket.recv(_PIECE)))
        answer: dict[str, Any] = json.loads(messages[0])
        return answer

    async def exchange_async(self, body: bytes, seconds: float) -> dict[str, Any]:
        """As :meth:`exchange`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        decoder = FrameDecoder()
        messages: list[bytes] = []
        async with asyncio.timeout(seconds):
            await loop.sock_sendall(self._socket, encode_frame(body))
            while not messages:
                piece = await loop.sock_recv(self._socket, _PIECE)
                messages = decoder.feed(_unless_closed(piece))
        answer: dict[str, Any]
        if len(messages[0]) > _PIECE:
            answer = await asyncio.to_thread(json.loads, messages[0])
        else:
            answer = json.loads(messages[0])
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


def _unless_closed(piece: bytes) -> bytes:
    if not piece:
        raise EOFError
    return piece
