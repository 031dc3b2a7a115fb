"""Measure the time from a clone to the first token, and show what is on the screen meanwhile.

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \\
        python -m tests.benchmarks.from_clone

It clones this repository into a temporary folder, runs ``make serve`` there in a terminal of 100
columns, and asks the server for a token as soon as it answers. Packages come from pip's cache if
they are there: run it twice, and take the second run. Nothing but the cache stays behind.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.server_process import free_ports
from tests.tools.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
STAGES = (
    ("the virtual environment, and a newer pip", b"Creating .venv"),
    ("packages are found and read", b"Installing tgi"),
    ("packages are unpacked", b"Installing collected packages"),
    ("the kernels are compiled", b"compiling the kernels"),
    ("the server starts", b"/tgi serve --port"),
)
"""What happens, and the text that it begins with on the screen."""
_SECONDS = 3600.0
_BODY = json.dumps({"inputs": "def read_json(path):", "parameters": {"max_new_tokens": 2}})


@dataclass(slots=True)
class Stage:
    """A part of the installation.

    Attributes:
        name: what happens.
        began: seconds since the clone began.
        lines: the last lines of the screen in it, and how often they were seen.
    """

    name: str
    began: float
    lines: Counter[str] = field(default_factory=Counter)


def first_token(port: int) -> bool:
    """Whether the server has answered with a token."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as there:
        try:
            headers = {"Content-Type": "application/json"}
            there.request("POST", "/generate_stream", _BODY, headers)
            return there.getresponse().readline().startswith(b"data:")
        except OSError:
            return False


def run(folder: Path, port: int) -> list[Stage]:
    """Clone and serve; returns the stages, the last of which is the first token."""
    began = time.monotonic()
    clone = folder / "tgi"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    print(f"cloned in {time.monotonic() - began:.1f} s")
    command = ["make", "-C", str(clone), "serve", f"PORT={port}"]
    stages: list[Stage] = []
    awaited = [*STAGES]
    end = time.monotonic() + _SECONDS
    own = {"PYTHONPATH": ""}  # the clone's package, not this one
    with Terminal(command, own, columns=100, lines=30) as terminal:
        while time.monotonic() < end:
            lines = terminal.shown()
            now = time.monotonic() - began
            begun = [index for index, (_, text) in enumerate(awaited) if text in terminal.written]
            if begun:  # without a compiler, one of them does not come
                stages.append(Stage(awaited[begun[-1]][0], now))
                del awaited[: begun[-1] + 1]
                print(f"{now:.0f} s: {stages[-1].name}", flush=True)
            elif stages and lines:
                stages[-1].lines[lines[-1].strip()] += 1
            if not awaited and first_token(port):
                stages.append(Stage("the first token", time.monotonic() - began))
                return stages
            if terminal.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(terminal.everything() + "\nit ended without an answer")


def table(stages: Sequence[Stage]) -> None:
    """Print the stages as docs/install.md has them."""
    print("\n| from | what happens | longest on the screen's last line |\n|---|---|---|")
    for stage in stages:
        shown = "".join(f"`{line}`" for line, _ in stage.lines.most_common(1))
        print(f"| {stage.began:.0f} s | {stage.name} | {shown} |")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    [port] = free_ports(1)
    print(f"load before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="tgi-clone-") as folder:
        table(run(Path(folder), port))


if __name__ == "__main__":
    main()
