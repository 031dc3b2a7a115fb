"""A process of the server: its start, its end, and what the end means."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping

from tgi_cli.errors import ExitCode, TgiError
from tgi_cli.launcher import oom
from tgi_cli.launcher.commands import environment
from tgi_cli.launcher.log_forwarder import Relay

# -P: files in the working directory do not pass for modules.
TGI = [sys.executable, "-P", "-m", "tgi_cli"]

_TIDY_SECONDS = 2.0
"""What the processes that a child has started get to end by themselves when it has ended."""
_DUMP_SECONDS = 0.5
"""What a child that hangs gets to say where it does."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_SEE_LOG = "see its log above"


class Child:
    """A running part of the server, named in the words of its users.

    Args:
        name: such as "model server".
        failure: the error that its unexplained end is.
        command: what to run, in a process group of its own.
        pass_fds: what it inherits.
        variables: of its environment, beside ours.
        role: with one, what it writes to stderr is passed on as log lines of that role; None: it
            writes to our stderr itself.
    """

    def __init__(
        self,
        name: str,
        failure: type[TgiError],
        command: list[str],
        pass_fds: Iterable[int] = (),
        variables: Mapping[str, str] | None = None,
        role: str | None = None,
    ) -> None:
        self.name = name
        self._failure = failure
        self._cause = ""
        self._ending = threading.Lock()
        self._ended = False
        self._kills = oom.kills()
        # A session of its own: Ctrl-C on the terminal is the launcher's to handle.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=None if role is None else subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            env=environment() | dict(variables or {}),
            start_new_session=True,
        )
        self._relay: Relay | None = None
        if role is not None and self._process.stderr is not None:
            self._relay = Relay(self._process.stderr, role)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Block until it has ended, and all that it had started."""
        self._process.wait()
        with self._ending:
            if self._ended:  # its number may be somebody else's by now
                return
            self._end_group()
            if self._relay is not None:
                self._relay.finish()
            self._ended = True

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it now; what it had started ends by itself, or with :meth:`wait`."""
        self.send(signal.SIGKILL)

    def kill_hung(self, cause: str) -> None:
        """Kill it because of ``cause``, after it was asked for the stacks of its threads."""
        self._cause = cause
        self.send(signal.SIGUSR1)  # see tgi_cli.logging.dump_on_signal
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DUMP_SECONDS)
        self.kill()

    def end(self) -> TgiError:
        """Its unasked-for end in words."""
        status = self._process.wait()
        if self._cause:
            return self._failure(self._cause, _SEE_LOG)
        if status < 0:
            return self._failure(
                f"the {self.name} was killed by {_signal_name(-status)}",
                self._kill_explained() if status == -signal.SIGKILL else _SEE_LOG,
            )
        if status == ExitCode.OK:
            return self._failure(f"the {self.name} ended unexpectedly", _SEE_LOG)
        return self._failure(f"the {self.name} ended with code {status}", _SEE_LOG)

    def _kill_explained(self) -> str:
        return oom.explain(self._kills, oom.kills())

    def failed(self) -> int:
        """The exit code that its unasked-for end gives the launcher.

        Raises:
            ShardError, RouterError: it ended without a word; one that exits with an error's code
                has said why itself.
        """
        status = self._process.wait()
        if status <= 0 or self._cause:
            raise self.end()
        if status in (ExitCode.FAILURE, ExitCode.INTERRUPTED) or status not in set(ExitCode):
            return int(self._failure.exit_code)
        return status

    def _end_group(self) -> None:
        """Whatever it had started ends with it: by itself, or killed."""
        end = time.monotonic() + _TIDY_SECONDS
        while self._group_lives():
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    def _group_lives(self) -> bool:
        """Whether a process of its group is left; those that are ours by now are collected."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def adopt_orphans() -> None:
    """Let processes whose parents die become this one's children, which it then collects.

    As if it were the first process of a container, where nobody else would (prctl(2)). Linux
    alone; elsewhere they go to the system's first process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have this process, a fork of ``parent``, get SIGTERM when that ends (prctl(2); Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(ExitCode.FAILURE)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
