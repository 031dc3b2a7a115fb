"""Real servers, as processes, on free ports, with a runtime folder of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

READY = re.compile(r'ready: (\S+) on (https?://[^\s"]+)')
START_SECONDS = 120.0
STOP_SECONDS = 60.0


def poll(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition; fails with ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} within {seconds:g} s"
        time.sleep(0.02)


class ServerProcess:
    """One ``tgi serve``: its log, its children, its runtime folder."""

    def __init__(self, folder: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.runtime = folder / "run"
        self.runtime.mkdir(mode=0o700)
        self._log = folder / "log"
        names = ("MODEL_ID", "PORT", "HOSTNAME", "JSON_OUTPUT", "LOG_LEVEL")
        inherited = {k: v for k, v in os.environ.items() if k not in names}
        own = {"XDG_RUNTIME_DIR": str(self.runtime), **environment}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tgi_cli", "serve", *arguments],
                env={**inherited, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a Ctrl-C is for it alone
            )

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        found = READY.search(self.log)
        assert found is not None, self.log
        return found[2]

    def wait_ready(self) -> None:
        """Wait for the ready line."""
        poll(
            lambda: READY.search(self.log) or self.process.poll() is not None,
            START_SECONDS,
            "the ready line comes",
        )
        assert READY.search(self.log), self.log

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(STOP_SECONDS)

    def child(self, command: str) -> int:
        """The process id of ``model-server`` or ``router``."""
        for pid in self.children():
            words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
            if command in words:
                return pid
        raise AssertionError(f"no {command} runs")

    def children(self) -> list[int]:
        """Process ids of what it started."""
        pid = self.process.pid
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
        return [int(child) for child in listed.split()]

    def end(self) -> None:
        """Whatever state it is in: no process of it stays."""
        if self.process.poll() is None:
            children = self.children()
            self.process.kill()
            self.process.wait()
            for pid in children:
                kill(pid)


def kill(pid: int) -> None:
    """SIGKILL, if it is there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def is_gone(pid: int) -> bool:
    """Whether a process has ended (its remains may wait for an init that does not collect)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def start_server() -> Iterator[StartServer]:
    """Start ``tgi serve`` with arguments and variables; all are ended with the session."""
    started: list[ServerProcess] = []
    # Not tmp_path: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as base:

        def start(*arguments: str, **environment: str) -> ServerProcess:
            folder = Path(base) / str(len(started))
            folder.mkdir(mode=0o700)
            address = ["--hostname", "127.0.0.1", "--port", "0"]
            server = ServerProcess(folder, [*address, *arguments], environment)
            started.append(server)
            return server

        yield start
        for server in started:
            server.end()


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> ServerProcess:
    """A server of the bundled model, shared by all tests that leave it as it is."""
    server = start_server()
    server.wait_ready()
    return server
