"""One child process of :mod:`tgi_cli.process.worker_pool`, and the messages to and from it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import site
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tgi_cli
from tgi_cli.process.pool_worker import HEAD

_PIECE = 256 << 10


class Child:
    """A process that runs a module of this package; used by one thread or task at a time.

    It ends when its input does, which is with this process.

    Args:
        module: its main module.
        environment: its variables, besides this process's.

    Raises OSError when it cannot be started.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                # -P: files in the working directory do not pass for modules.
                [sys.executable, "-P", "-m", module],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={**os.environ, **environment, **_where_this_is()},
                # An interrupt of the terminal's is for the router, which ends it then.
                start_new_session=True,
            )
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Its id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._popen.poll() is None

    def exchange(self, body: bytes, seconds: float) -> dict[str, Any]:
        """Send a message, and return the answer. Blocks.

        Raises TimeoutError, and OSError or EOFError when the process is gone.
        """
        until = time.monotonic() + seconds
        left = memoryview(HEAD.pack(len(body)) + body)
        while left:
            self._wait(select.POLLOUT, until)
            left = left[self._socket.send(left) :]
        (length,) = HEAD.unpack(self._receive(HEAD.size, until))
        answer: dict[str, Any] = json.loads(self._receive(length, until))
        return answer

    async def exchange_async(self, body: bytes, seconds: float) -> dict[str, Any]:
        """As :meth:`exchange`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            await loop.sock_sendall(self._socket, HEAD.pack(len(body)) + body)
            found = bytearray()
            length = HEAD.size
            while len(found) < length:
                piece = await loop.sock_recv(self._socket, _PIECE)
                if not piece:
                    raise EOFError
                found += piece
                if length == HEAD.size and len(found) >= HEAD.size:
                    length += HEAD.unpack_from(found)[0]
        answer: dict[str, Any]
        if length > _PIECE:
            answer = await asyncio.to_thread(json.loads, found[HEAD.size :])
        else:
            answer = json.loads(found[HEAD.size :])
        return answer

    def _receive(self, count: int, until: float) -> bytes:
        found = bytearray()
        while len(found) < count:
            self._wait(select.POLLIN, until)
            piece = self._socket.recv(min(count - len(found), _PIECE))
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)

    def _wait(self, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), event)
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1e3):
            raise TimeoutError

    def kill(self) -> None:
        """End it now; whoever waits for its answer sees that it is gone. From any thread."""
        self._popen.kill()
        self._popen.wait()

    def end(self, seconds: float = 0.0) -> int:
        """Its exit code, or the number of the signal that ended it, below 0; by its user alone.

        It is killed if it does not end by itself within so many seconds.
        """
        try:
            code = self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        self._socket.close()
        return code


def _where_this_is() -> dict[str, str]:
    """What lets another Python find this package, if it is not installed."""
    root = str(Path(tgi_cli.__file__).resolve().parents[1])
    if root in [*site.getsitepackages(), site.getusersitepackages()]:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
