"""``tgi`` as a process, with a log and a runtime folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.tools.process_tree import children_of, command_of, descendants_of

READY = re.compile(r'ready: (\S+) on (https?://[^\s"]+)')
START_SECONDS = 240.0
STOP_SECONDS = 120.0

_POLL_SECONDS = 0.02
_STALL_SECONDS = 1.0
"""A pause that lasts longer was not slept by choice."""
_SETTINGS = ("MODEL_ID", "PORT", "HOSTNAME", "JSON_OUTPUT", "LOG_LEVEL")
"""Variables that a process under test does not inherit."""


class ServerProcess:
    """A ``tgi`` command.

    Args:
        folder: for the log and the runtime folder.
        arguments: of ``tgi``, such as ``serve --port 0``.
        environment: further variables.
        prefix: of the command, such as ``nsenter ...``.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.runtime = folder / "run"
        self.runtime.mkdir(mode=0o700)
        self._log = folder / "log"
        inherited = {key: value for key, value in os.environ.items() if key not in _SETTINGS}
        own = {"XDG_RUNTIME_DIR": str(self.runtime), **(environment or {})}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tgi_cli", *arguments],
                env=inherited | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        found = READY.search(self.log)
        assert found is not None, self.log
        return found[2]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait for the ready line in the log."""
        poll(lambda: READY.search(self.log) or not self.running, seconds, "the ready line appears")
        assert READY.search(self.log), self.log

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(STOP_SECONDS)

    def child(self, command: str) -> int:
        """The process id of ``model-server`` or ``router``."""
        for pid in self.children():
            if f" {command} " in command_of(pid):
                return pid
        raise AssertionError(f"no {command} is running")

    def children(self) -> list[int]:
        """Process ids of its children."""
        return children_of(self.process.pid)

    def kill(self) -> None:
        """Kill it and its descendants, in whatever state it is."""
        if self.running:
            descendants = descendants_of(self.process.pid)
            self.process.kill()
            self.process.wait()
            for pid in descendants:
                kill(pid)


def poll(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition; fail with ``what`` after ``seconds``.

    Time in which this process is stopped, or gets no processor, is not counted.
    """
    end = time.monotonic() + seconds
    while not condition():
        before = time.monotonic()
        assert before < end, f"{what} within {seconds:g} s"
        time.sleep(_POLL_SECONDS)
        end += max(0.0, time.monotonic() - before - _STALL_SECONDS)


def kill(pid: int) -> None:
    """Send SIGKILL if the process exists."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def stop(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> None:
    """Send SIGTERM, and after ``seconds`` SIGKILL; wait for the end."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that are free at the moment.

    They are below those that Linux gives to sockets that name none, so that nobody takes one before
    the server does (https://docs.kernel.org/networking/ip-sysctl.html, ip_local_port_range).
    """
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(range(20_000, 32_768))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return [*found]
