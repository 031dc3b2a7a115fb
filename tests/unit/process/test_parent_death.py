"""A child whose parent is killed outright ends too, and clears up in its stead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tgi_cli.errors import ConfigError
from tgi_cli.process import parent_death

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
from tgi_cli.launcher import lifeline
lifeline.GRACE_SECONDS = 0.2
{before}
lifeline.hold(int(sys.argv[1]), Path({marker!r}).touch)
Path({ready!r}).touch()
while True:
    time.sleep(0.05)
"""


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        # An orphan's remains may wait for an init that does not collect them.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child outlived its parent")


@pytest.mark.parametrize(
    "before",
    ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"],
    ids=["polite", "deaf to SIGTERM"],
)
def test_no_child_outlives_its_parent(tmp_path: Path, before: str) -> None:
    marker, ready = tmp_path / "cleaned", tmp_path / "ready"
    code = CHILD.format(before=before, marker=str(marker), ready=str(ready))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    end = time.monotonic() + 20
    while not ready.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pid)
    assert marker.exists()


def test_a_number_that_is_no_descriptor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--lifeline-fd"):
        parent_death.exit_with_parent(10_000)
