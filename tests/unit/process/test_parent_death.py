"""A child whose parent is killed ends too, and cleans up for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.process_tree import is_gone
from tgi_cli.errors import ConfigError
from tgi_cli.process import parent_death
from tgi_cli.process.runtime_dir import VARIABLE

PARENT = """
import os, subprocess, sys, time
reading, writing = os.pipe()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(reading)], pass_fds=[reading])
print(child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import sys, time
from pathlib import Path
from tgi_cli.process import parent_death
parent_death.GRACE_SECONDS = 0.2
{before}
parent_death.exit_with_parent(int(sys.argv[1]))
Path({ready!r}).touch()
while True:
    time.sleep(0.05)
"""


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if is_gone(pid):
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child outlived its parent")


@pytest.mark.parametrize(
    "before",
    ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"],
    ids=["polite", "deaf to SIGTERM"],
)
def test_no_child_outlives_its_parent(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ready = tmp_path / "runtime", tmp_path / "ready"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    code = CHILD.format(before=before, ready=str(ready))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    end = time.monotonic() + 60
    while not ready.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pid)
    assert not folder.exists(), "the child removes the runtime folder in the parent's stead"


def test_the_pipe_is_closed_with_the_block() -> None:
    with parent_death.parent_pipe() as fd:
        os.fstat(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_closed_descriptor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="is not an open descriptor"):
        parent_death.exit_with_parent(10_000)
