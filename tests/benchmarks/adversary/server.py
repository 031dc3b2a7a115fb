"""The server under test: a running one, or one that is started, and restarted when it dies."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tests.tools.process_tree import descendants_of
from tests.tools.server_process import free_ports

KEY = "benchmark"
_START_SECONDS = 180.0


class Server:
    """``tgi serve`` with the bundled model and adapters enabled, or a running server.

    Args:
        url: URL of a running server, which is never restarted. Default: start one.
        pid: process ID of its launcher, to measure memory; 0 if unknown.
        key: API key.
        flags: extra flags of a server that is started.
    """

    def __init__(
        self, url: str = "", pid: int = 0, key: str = KEY, flags: Sequence[str] = ()
    ) -> None:
        self.own = not url
        self.key = key
        self.restarts = 0
        self._flags = list(flags)
        self._folder = tempfile.TemporaryDirectory(prefix="tgi-")
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = pid
        if url:
            parts = urlsplit(url)
            self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        else:
            self.address = ("127.0.0.1", free_ports(1)[0])
            self._start()

    @property
    def log(self) -> str:
        """Log of all starts of our own server."""
        path = Path(self._folder.name) / "log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def healthy(self, seconds: float = 2.0) -> bool:
        """Return whether /health responds with 200 within ``seconds``."""
        connection = http.client.HTTPConnection(*self.address, timeout=seconds)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def recover(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until it is healthy; return whether it had to be restarted."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.healthy():
                return False
            if self._process is not None and self._process.poll() is not None:
                break
            time.sleep(0.1)
        if not self.own:
            raise SystemExit("the server is no longer healthy; restart it")
        self.stop(kill=True)
        self._start()
        self.restarts += 1
        return True

    def stop(self, kill: bool = False) -> None:
        """Stop the server if we started it."""
        if self._process is None:
            return
        below = descendants_of(self._process.pid) if self._process.poll() is None else []
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process = None

    def close(self) -> None:
        """Stop the server and delete its files."""
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        host, port = self.address
        command = [sys.executable, "-m", "tgi_cli", "serve", "--hostname", host]
        command += ["--port", str(port), "--max-loras", "2", "--json-output"]
        command += ["--graceful-termination-timeout", "5", *self._flags]
        with (Path(self._folder.name) / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"API_KEY": self.key},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid
        end = time.monotonic() + _START_SECONDS
        while not self.healthy():
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{self.log[-3000:]}")
            time.sleep(0.1)
