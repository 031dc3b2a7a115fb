"""Libraries without a server: a driver in a process of its own, asked over its pipes."""

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
    last_words,
)

DRIVERS = Path(__file__).parent / "drivers"


class Driver(Running):
    """A driver reads a wave from a line and answers one line: when tokens came."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        super().__init__(process, log)
        try:
            self._answer(START_TIMEOUT)
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
            raise Failure(f"it ended: {last_words(self.log)}") from None
        answer = self._answer(timeout)
        if "error" in answer:
            raise Failure(str(answer["error"])[:200])
        if any(count != new for count in answer["tokens"]):
            raise Failure(f"{answer['tokens']} tokens where {new} were asked for")
        return Wave(max(answer["last"]), tuple(answer["first"]), tuple(answer["last"]))

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        # A whole line is there at once: the driver writes nothing else, and flushes it.
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.close()
            raise Failure(f"no answer in {timeout:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise Failure(f"it ended: {last_words(self.log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
