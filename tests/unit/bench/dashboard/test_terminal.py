"""In a real terminal: whatever ends the dashboard, the terminal is given back."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys, threading, time
from tests.unit.bench.dashboard.script import batch_run, step_events
from tgi_cli.bench.dashboard import ScreenOptions, ScreenTitle, run_screen
from tgi_cli.errors import ShardError

over = threading.Event()

def start(emit):
    run = batch_run()
    for event in step_events(0, 6, run.steps[0]):
        emit(event)
    if sys.argv[1] == "dies":
        raise ShardError("the model server died", "see its log")
    over.wait(60)
    return run

try:
    run = run_screen(ScreenOptions(title=ScreenTitle("模型"), start=start, stop=over.set))
except ShardError as error:
    print("error:", error.cause)
    sys.exit(error.exit_code)
print("steps:", len(run.steps))
"""
RESTORED = b"\x1b[?1049l"


class Terminal:
    """A child on a terminal of its own."""

    def __init__(self, how: str) -> None:
        self.seen = b""
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)

    def read_until(self, wanted: bytes, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while wanted not in self.seen:
            assert time.monotonic() < end, self.seen[-2000:]
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._ours, 65536)
                except OSError:  # the child has closed its side
                    assert wanted in self.seen, self.seen[-2000:]

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(request):
    child = Terminal(request.param)
    yield child
    child.close()


@pytest.mark.parametrize("terminal", ["runs"], indirect=True)
def test_q_gives_the_terminal_and_the_run_back(terminal: Terminal) -> None:
    terminal.read_until(b"11 / 11")
    terminal.type("q")
    terminal.read_until(b"steps: 6")
    assert terminal.child.wait(30) == 0
    assert terminal.seen.index(RESTORED) < terminal.seen.index(b"steps: 6")


@pytest.mark.parametrize("terminal", ["dies"], indirect=True)
def test_a_run_that_died_stays_readable_and_gives_its_exit_code(terminal: Terminal) -> None:
    terminal.read_until(b"the model server died")
    terminal.type("\x03")
    terminal.read_until(b"error: the model server died")
    assert terminal.child.wait(30) == 7
    assert RESTORED in terminal.seen


@pytest.mark.parametrize("terminal", ["runs"], indirect=True)
def test_a_kill_gives_the_terminal_back(terminal: Terminal) -> None:
    terminal.read_until(b"11 / 11")
    terminal.child.send_signal(signal.SIGTERM)
    terminal.read_until(RESTORED)
    assert terminal.child.wait(30) == 128 + signal.SIGTERM
