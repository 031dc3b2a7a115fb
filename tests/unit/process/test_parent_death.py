"""A child whose parent is killed ends too, and cleans up for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.process_tree import is_gone
from tests.tools.server_process import kill, poll
from tgi_cli.errors import ConfigError
from tgi_cli.process import parent_death
from tgi_cli.process.runtime_dir import VARIABLE

PARENT = """
import os, subprocess, sys
reading, writing = os.pipe()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(reading)], pass_fds=[reading])
print(child.pid, flush=True)
sys.stdin.read()
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


SECONDS = 240.0
"""More than the slowest start of two interpreters."""


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
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, code],
        stdin=subprocess.PIPE,  # the parent ends with it if this test does
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            poll(ready.exists, SECONDS, "the child watches its parent")
            parent.kill()
            parent.wait()
            poll(lambda: is_gone(pid), SECONDS, "the child ends with its parent")
        finally:
            parent.kill()
            if not is_gone(pid):
                kill(pid)
    assert not folder.exists(), "the child removes the runtime folder in the parent's stead"


def test_the_pipe_is_closed_with_the_block() -> None:
    with parent_death.parent_pipe() as fd:
        os.fstat(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_closed_descriptor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="is not an open descriptor"):
        parent_death.exit_with_parent(10_000)
