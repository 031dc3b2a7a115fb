"""What is done apart comes back as if it were done here, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tgi_cli.errors import ExitCode, GatedModelError, HubError
from tgi_cli.launcher.run_in_fork import run_in_fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there it is done right here")

LAUNCHER = """
import signal, sys, time
from tgi_cli.launcher.run_in_fork import apart
def leave(number, frame):
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
def work():
    import os
    print(os.getpid(), flush=True)
    time.sleep(60)
apart(work)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended, also if nobody has collected it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_result_comes_back_and_imports_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> tuple[int, str]:
        import this_alone

        return os.getpid(), this_alone.__name__

    (tmp_path / "this_alone.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    pid, name = run_in_fork(work)
    assert pid != os.getpid()
    assert name not in sys.modules


def test_errors_come_back() -> None:
    def refuse() -> None:
        raise GatedModelError("not for you", "ask for it")

    def fail() -> None:
        raise KeyError("a")

    with pytest.raises(GatedModelError, match="not for you") as refused:
        run_in_fork(refuse)
    assert (refused.value.remedy, refused.value.exit_code) == (
        "ask for it",
        ExitCode.MODEL_UNAVAILABLE,
    )
    with pytest.raises(RuntimeError, match="KeyError: 'a'") as failed:
        run_in_fork(fail)
    assert "in fail" in failed.value.__notes__[0]


def test_a_killed_child_is_an_error() -> None:
    with pytest.raises(HubError, match="code -9"):
        run_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_parent(number: signal.Signals) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert launcher.stdout is not None
    with launcher, launcher.stdout as told:
        child = int(told.readline())
        launcher.send_signal(number)
        launcher.wait(20)
    end = time.monotonic() + 20
    while not gone(child):
        assert time.monotonic() < end, "the child goes on"
        time.sleep(0.01)
    if number == signal.SIGTERM:
        assert launcher.returncode == 0
