"""Work whose imports are not to stay: done in a child, of which only the result comes back.

To find or download a model takes libraries of 20 MB that a launcher never needs again.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from tgi_cli.errors import ExitCode, HubError, TgiError
from tgi_cli.launcher.child_process import end_with_parent

T = TypeVar("T")


def run_in_fork(work: Callable[[], T]) -> T:
    """What ``work`` returns, which has to be picklable, or the TgiError that it raises.

    The child is a fork: it has this process's log, terminal and signal handlers. Call it while
    there is one thread. Signals that end this process end it too. Done in this very process where
    forks are not safe, which is everywhere but on Linux.

    Raises:
        HubError: the child was killed.
        RuntimeError: any other error, by its name, with its traceback as a note.
    """
    if sys.platform != "linux":
        return work()
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(work, writing, parent)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
    except BaseException:  # a signal: it is the child's too
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if not told:
        code = os.waitstatus_to_exitcode(status)
        raise HubError(
            f"what looks for the model ended with code {code}", "see its log above, and try again"
        )
    error, result = pickle.loads(told)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _work(work: Callable[[], object], writing: int, parent: int) -> None:
    """In the child: work, tell, end."""
    status = ExitCode.FAILURE
    try:
        end_with_parent(parent)
        try:
            told = pickle.dumps((None, work()))
        except Exception as error:  # whatever it is, the parent is to raise it
            known = isinstance(error, TgiError)
            raised = error if known else RuntimeError(f"{type(error).__name__}: {error}")
            raised.add_note(traceback.format_exc())
            told = pickle.dumps((raised, None))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(told)
        status = ExitCode.OK
    except (KeyboardInterrupt, SystemExit):
        pass  # told to end, as the parent is, which says so
    finally:
        os._exit(status)
