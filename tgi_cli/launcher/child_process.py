"""A process of the server: its start, its end, and the error that its end amounts to."""

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

from tgi_cli.config.settings import SETTINGS
from tgi_cli.errors import ExitCode, TgiError
from tgi_cli.launcher import oom
from tgi_cli.launcher.log_forwarder import LogForwarder
from tgi_cli.process.spawn import child_environment

_TIDY_SECONDS = 2.0
"""Time for a child's own children to end after it has ended."""
_DUMP_SECONDS = 0.5
"""Time for a hung child to write the stacks of its threads."""
_PR_SET_CHILD_SUBREAPER = 36

_SEE_LOG = "see its log above"


class ChildProcess:
    """A running part of the server.

    Args:
        name: As users know it, such as "model server".
        failure: The error that an unexplained end amounts to.
        command: Runs in a process group of its own.
        pass_fds: Descriptors that it inherits.
        variables: Environment variables besides :func:`inherited_environment`.
        role: If set, what it writes to stderr is forwarded as log lines of this role; otherwise
            it writes to this process's stderr.
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
            env=inherited_environment() | dict(variables or {}),
            start_new_session=True,
        )
        self._forwarder: LogForwarder | None = None
        if role is not None and self._process.stderr is not None:
            self._forwarder = LogForwarder(self._process.stderr, role)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Block until the process and everything that it started have ended."""
        self._process.wait()
        with self._ending:
            if self._ended:  # another process may have its id by now
                return
            self._end_group()
            if self._forwarder is not None:
                self._forwarder.finish()
            self._ended = True

    def send(self, number: signal.Signals) -> None:
        """Signal the process if it runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process; what it started ends by itself, or with :meth:`wait`."""
        self.send(signal.SIGKILL)

    def kill_hung(self, cause: str) -> None:
        """Kill the process because of ``cause``, after asking for the stacks of its threads."""
        self._cause = cause
        self.send(signal.SIGUSR1)  # see tgi_cli.logging.dump_on_signal
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DUMP_SECONDS)
        self.kill()

    def end(self) -> TgiError:
        """Return the unexpected end as an error."""
        status = self._process.wait()
        remedy = _SEE_LOG
        if self._cause:
            cause = self._cause
        elif status < 0:
            cause = f"the {self.name} was killed by {_signal_name(-status)}"
            if status == -signal.SIGKILL:
                remedy = oom.explain(self._kills, oom.kills())
        elif status == ExitCode.OK:
            cause = f"the {self.name} ended unexpectedly"
        else:
            cause = f"the {self.name} ended with code {status}"
        return self._failure(cause, remedy)

    def failed(self) -> int:
        """Return the launcher's exit code after an unexpected end.

        Raises:
            ShardError, RouterError: The process did not report why it ended; one that exits with
                an error's code has done so.
        """
        status = self._process.wait()
        if status <= 0 or self._cause:
            raise self.end()
        if status in (ExitCode.FAILURE, ExitCode.INTERRUPTED) or status not in set(ExitCode):
            return int(self._failure.exit_code)
        return status

    def _end_group(self) -> None:
        """Wait for everything that the process started, and kill what does not end."""
        end = time.monotonic() + _TIDY_SECONDS
        while self._group_lives():
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    def _group_lives(self) -> bool:
        """Whether a process of the group is left; collects those that this process adopted."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without settings: children receive those as structs."""
    settings = {
        name for setting in SETTINGS if not setting.inherited for name in setting.all_variables
    }
    return child_environment(
        {name: value for name, value in os.environ.items() if name not in settings}
    )


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they are collected.

    In a container whose first process this is not, nothing else may do so (prctl(2)). On Linux
    only; elsewhere orphans go to the system's first process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
