"""Child processes of this package: commands, environments, configurations, forks."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import site
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tgi_cli.errors import ConfigError, ExitCode, HubError, TgiError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of this package."""
    # -P: a file in the working directory must not shadow a module.
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ``base``, by default this process's environment, such that a child finds the package.

    It may be imported from a checkout, through a path that a child would not have.
    """
    environment = dict(os.environ if base is None else base)
    root = str(Path(__file__).resolve().parents[2])
    if root not in [*site.getsitepackages(), site.getusersitepackages()]:
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def open_memory_file(name: str) -> int:
    """Open a file without a name in the file system; a child may inherit its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_config(config: object) -> int:
    """Write a dataclass for a child to read; return the descriptor that the child inherits.

    Unlike arguments and environments, its content is not visible to other users.
    """
    import msgspec

    fd = open_memory_file("tgi-config")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(msgspec.json.encode(config, enc_hook=str))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_config(fd: int, kind: type[T]) -> T:
    """Read what :func:`write_config` wrote in the parent, and close the descriptor.

    Raises:
        ConfigError: ``fd`` is not such a descriptor.
    """
    import msgspec

    def convert(field: type, value: Any) -> Any:
        return field(value)  # paths are the only fields that JSON has no form for

    try:
        with os.fdopen(fd, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind, dec_hook=convert)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--config-fd {fd} is not the configuration of a child process",
            "leave it off: it is for `tgi serve`",
        ) from error


def run_in_fork(work: Callable[[], T]) -> T:
    """Return what ``work`` returns in a forked child, so that its imports do not stay.

    To find or download a model takes libraries of 20 MB that a launcher never needs again. The
    result, or the TgiError that ``work`` raises, must be picklable. The child has this process's
    log, terminal and signal handlers. Call it while no other thread may hold a lock. Signals that
    end this process end the child too. Where forks are not safe, which is everywhere but on Linux,
    ``work`` runs in this process.

    Raises:
        HubError: The child was killed.
        RuntimeError: ``work`` raised another error; the message names it, a note has its
            traceback.
    """
    if sys.platform != "linux":
        return work()
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_and_exit(work, writing, parent)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # a signal, which the child gets too
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        raise HubError(
            f"the process that looks for the model ended with code {code}",
            "see its log above, and try again",
        )
    error, result = pickle.loads(answer)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _run_and_exit(work: Callable[[], object], writing: int, parent: int) -> None:
    """In the child: write the pickled result or error, and exit."""
    status = ExitCode.FAILURE
    try:
        _terminate_with(parent)
        try:
            answer = pickle.dumps((None, work()))
        except Exception as error:  # whatever it is, the parent raises it
            known = isinstance(error, TgiError)
            raised = error if known else RuntimeError(f"{type(error).__name__}: {error}")
            raised.add_note(traceback.format_exc())
            answer = pickle.dumps((raised, None))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        status = ExitCode.OK
    except (KeyboardInterrupt, SystemExit):
        pass  # the signal ends the parent too, which reports it
    finally:
        os._exit(status)


def _terminate_with(parent: int) -> None:
    """Get SIGTERM when ``parent``, which forked this process, ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(ExitCode.FAILURE)
