"""Interfaces of contestants: starting them, and sending them waves of requests."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.columns import Column

START_TIMEOUT = 1200.0  # a first start may compile kernels
STOP_TIMEOUT = 30.0


class Failure(Exception):
    """A contestant failed at something; the run continues without that figure."""


@dataclass(frozen=True)
class Setup:
    """The requirements that a contestant is started with.

    Attributes:
        sequences: largest number of concurrent requests.
        context: tokens of the longest prompt and its output.
        cached_tokens: tokens of all sequences of the largest wave together.
    """

    sequences: int
    context: int
    cached_tokens: int

    @classmethod
    def of(cls, columns: Sequence[Column]) -> Setup:
        return cls(
            sequences=max(column.concurrency for column in columns),
            context=max(column.prompt + column.new for column in columns),
            cached_tokens=max(
                column.concurrency * (column.prompt + column.new) for column in columns
            ),
        )


@dataclass(frozen=True)
class Wave:
    """The times of requests that were sent at once.

    Attributes:
        seconds: from sending them to the last token of the last.
        first: seconds to the first token of each request.
        last: seconds to the last token of each request.
    """

    seconds: float
    first: tuple[float, ...]
    last: tuple[float, ...]


class Running(ABC):
    """A running contestant, ready for waves."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    @abstractmethod
    def wave(self, prompts: Sequence[Sequence[int]], new: int, timeout: float) -> Wave:
        """Send all prompts at once and generate ``new`` tokens for each, greedily.

        Raises:
            Failure: a response is an error, has too few tokens, or exceeds ``timeout``.
        """

    def close(self) -> None:
        """Stop the process and its descendants."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(timeout=STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(timeout=STOP_TIMEOUT)


class Contestant(ABC):
    """A server or a library with one kind of weights.

    Attributes:
        name: unique among the contestants.
        transport: how it gets requests, for the tables.
    """

    transport = "HTTP"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions of the installed packages."""

    @abstractmethod
    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        """Return the path to load: the checkpoint, or its conversion, stored in ``folder``."""

    @abstractmethod
    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        """Start the contestant and wait until it is ready.

        Raises:
            Failure: it exited, or is not ready in time.
        """

    @abstractmethod
    def weight_bytes(self, model: Path) -> int:
        """Return the bytes of weights that decoding one token reads."""

    def visits(self, columns: Sequence[Column]) -> list[list[Column]]:
        """Group the columns; each group is measured in a process of its own."""
        return [list(columns)]


def spawn(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    piped: bool = False,
) -> subprocess.Popen[str]:
    """Start ``command`` in a process group of its own, with its output in ``log``.

    ``OMP_NUM_THREADS`` is not inherited, so that it can use all cores. With ``piped``, standard
    input and output are pipes for the caller.
    """
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with log.open("a") as output:
        output.write(f"$ {' '.join(map(str, command))}\n")
        output.flush()
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else output,
            stderr=output,
            text=True,
            env=inherited | offline | dict(environment or {}),
            start_new_session=True,
        )


def convert(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run a converter and wait for it.

    Raises:
        Failure: it failed.
    """
    process = spawn(command, log, environment)
    try:
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if status != 0:
        raise Failure(f"{Path(command[0]).name} failed: {last_line(log)}")


def installed(python: Path, *packages: str) -> dict[str, str]:
    """Return the versions of ``packages`` in the environment of an interpreter."""
    code = "import sys; from importlib.metadata import version\n"
    code += "for name in sys.argv[1:]: print(name, version(name))"
    try:
        output = subprocess.run(
            [python, "-c", code, *packages], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Failure(f"{python} does not have {', '.join(packages)}: {error}") from error
    return dict(line.split() for line in output.splitlines())


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, for error messages."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no output")[:200]


def interpreter(environment: Path) -> Path:
    """Return the interpreter of a virtual environment, or the path itself if it is a file."""
    return environment / "bin" / "python" if environment.is_dir() else environment
