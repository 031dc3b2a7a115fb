"""Errors that users can act on, each with a cause, a remedy and an exit code.

A command that fails prints ``error: CAUSE`` and the remedy, if there is one, on one line each and
without a traceback, and exits with the code of the error's class. The codes are part of the
command line's interface (docs/commands.md) and never change meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of every ``tgi`` command."""

    OK = 0
    FAILURE = 1
    """Any other error: a bug, or an error of the operating system."""
    USAGE = 2
    """An invalid flag or combination of flags."""
    MODEL_UNAVAILABLE = 3
    """The model is unavailable: unknown, gated, offline, disk full, corrupt download."""
    MODEL_UNUSABLE = 4
    """The model cannot be run: broken files, unsupported architecture."""
    ADDRESS_IN_USE = 5
    """The port or the socket is in use, or cannot be bound."""
    OUT_OF_MEMORY = 6
    """Weights or KV cache do not fit into the device's memory."""
    SHARD_FAILED = 7
    """A model server failed to start, or exited."""
    ROUTER_FAILED = 8
    """The router failed to start, or exited."""
    INTERRUPTED = 130
    """Interrupted by Ctrl-C (128 + SIGINT)."""


class TgiError(Exception):
    """Base class of errors that users can act on.

    Attributes:
        cause: the problem, in one line.
        remedy: advice in one line, or an empty string.
        exit_code: exit code of the command.
    """

    exit_code: ExitCode = ExitCode.FAILURE

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


class ConfigError(TgiError):
    """An invalid setting or combination of settings."""

    exit_code = ExitCode.USAGE


class HubError(TgiError):
    """The model is unavailable."""

    exit_code = ExitCode.MODEL_UNAVAILABLE


class ModelNotFoundError(HubError):
    """A repository, revision or folder that does not exist or is not visible to this token."""


class GatedModelError(HubError):
    """A repository that requires a token, or a token whose owner has accepted its terms."""


class OfflineError(HubError):
    """A file that is not cached while the hub is unavailable or HF_HUB_OFFLINE is set."""


class DiskFullError(HubError):
    """Not enough disk space for a download."""


class CorruptFileError(HubError):
    """A file with a wrong size, checksum or header."""


class ModelError(TgiError):
    """The model's files cannot be used."""

    exit_code = ExitCode.MODEL_UNUSABLE


class UnsupportedModelError(ModelError):
    """An architecture, or an option of one, that is not supported."""


class CheckpointError(ModelError):
    """Missing, unexpected, misshapen or unreadable weights."""


class AddressInUseError(TgiError):
    """The port or the socket path cannot be bound."""

    exit_code = ExitCode.ADDRESS_IN_USE


class OutOfMemoryError(TgiError):
    """Weights or KV cache do not fit into the device's memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class ShardError(TgiError):
    """A model server that failed to start, exited or is unavailable."""

    exit_code = ExitCode.SHARD_FAILED


class RouterError(TgiError):
    """A router that failed to start or exited."""

    exit_code = ExitCode.ROUTER_FAILED


class LibraryPanicError(Exception):
    """A library written in Rust has panicked; its own exception is no :class:`Exception`."""


@contextmanager
def no_panic() -> Iterator[None]:
    """Turn a panic of a library written in Rust into a LibraryPanicError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanicError(" ".join(str(error).split())[:200]) from error
