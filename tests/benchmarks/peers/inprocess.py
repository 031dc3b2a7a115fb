"""Runs libraries without a server in a driver process, controlled over pipes."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.contestant import (
    START_TIMEOUT,
    Failure,
    Running,
    Wave,
    last_line,
)

DRIVERS = Path(__file__).parent / "drivers"


class Driver(Running):
    """A driver, which reads a wave from a line of JSON and writes the token times as another."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        super().__init__(process, log)
        try:
            self._response(START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def wave(self, prompts: Sequence[Sequence[int]], new: int, timeout: float) -> Wave:
        request = {"prompts": [list(prompt) for prompt in prompts], "new": new}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failure(f"it exited: {last_line(self.log)}") from None
        response = self._response(timeout)
        if "error" in response:
            raise Failure(str(response["error"])[:200])
        if any(count != new for count in response["tokens"]):
            raise Failure(f"{response['tokens']} tokens instead of {new}")
        return Wave(max(response["last"]), tuple(response["first"]), tuple(response["last"]))

    def _response(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        # The driver writes and flushes one whole line at a time, so readline does not block.
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.close()
            raise Failure(f"no response within {timeout:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise Failure(f"it exited: {last_line(self.log)}")
        response: dict[str, Any] = json.loads(line)
        return response
