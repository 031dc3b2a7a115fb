"""Every error that a user can cause, each with its cause, its remedy and its exit code.

A command that fails prints ``error: CAUSE`` and, where there is one, ``REMEDY`` - one line
each, no traceback - and exits with the code of the error's class. The codes are part of the
command line's interface (docs/commands.md) and never change meaning.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of every ``tgi`` command."""

    OK = 0
    FAILURE = 1
    """An error that has no code of its own: a defect, or the operating system's refusal."""
    USAGE = 2
    """A flag or a combination of flags that cannot be."""
    MODEL_UNAVAILABLE = 3
    """The model could not be had: unknown, gated, offline, no room, transfer corrupt."""
    MODEL_UNUSABLE = 4
    """The model is there and cannot be run: broken files, unsupported architecture."""
    ADDRESS_IN_USE = 5
    """The port or the socket is taken, or may not be bound."""
    OUT_OF_MEMORY = 6
    """Weights or KV cache do not fit the device."""
    SHARD_FAILED = 7
    """A model server could not start, or died."""
    ROUTER_FAILED = 8
    """The router could not start, or died."""
    INTERRUPTED = 130
    """Ctrl-C before the command was done (128 + SIGINT)."""


class TgiError(Exception):
    """Base of all errors with a cause that the user can act on.

    ``cause`` says in one line what went wrong; ``remedy`` in one line what to do about it
    (empty where there is nothing to advise).
    """

    exit_code: ExitCode = ExitCode.FAILURE

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


class ConfigError(TgiError):
    """A flag, an environment variable or a combination of them that cannot be."""

    exit_code = ExitCode.USAGE


class HubError(TgiError):
    """The model could not be had."""

    exit_code = ExitCode.MODEL_UNAVAILABLE


class ModelNotFoundError(HubError):
    """No such repository, revision or folder - or one that this token may not see."""


class GatedModelError(HubError):
    """The repository asks for a token, or for a token whose owner accepted its terms."""


class OfflineError(HubError):
    """The hub cannot be reached (or may not be: HF_HUB_OFFLINE) and the cache lacks the file."""


class DiskFullError(HubError):
    """Not enough free space for the download."""


class CorruptFileError(HubError):
    """A file's size, checksum or header is not what it must be."""


class ModelError(TgiError):
    """The model's files are there and cannot be used."""

    exit_code = ExitCode.MODEL_UNUSABLE


class UnsupportedModelError(ModelError):
    """An architecture, or an option of one, that is not implemented."""


class CheckpointError(ModelError):
    """Weights that are missing, unexpected, mis-shaped or unreadable; the message names them."""


class AddressInUseError(TgiError):
    """The port or the socket path cannot be bound."""

    exit_code = ExitCode.ADDRESS_IN_USE


class OutOfMemoryError(TgiError):
    """Weights or KV cache do not fit into the device's memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class ShardError(TgiError):
    """A model server could not start, died or cannot be reached."""

    exit_code = ExitCode.SHARD_FAILED


class RouterError(TgiError):
    """The router could not start or died."""

    exit_code = ExitCode.ROUTER_FAILED
