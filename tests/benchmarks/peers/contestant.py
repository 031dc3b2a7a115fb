"""What takes part: a way to start it for a purpose, and waves of requests to send it."""

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
    """A contestant could not do something; the run goes on without that figure."""


@dataclass(frozen=True)
class Setup:
    """What a contestant is started for.

    Attributes:
        sequences: that run at once.
        context: tokens of the longest prompt with its answer.
        cached_tokens: of all sequences of the largest wave together.
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
    """Requests that were sent at once.

    Attributes:
        seconds: from sending them to the last token of the last.
        first: seconds to the first token, of each request.
        last: seconds to its last token, of each.
    """

    seconds: float
    first: tuple[float, ...]
    last: tuple[float, ...]


class Running(ABC):
    """A contestant's process, ready for waves."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    @abstractmethod
    def wave(self, prompts: Sequence[Sequence[int]], new: int, timeout: float) -> Wave:
        """Send all prompts at once and take ``new`` tokens of each, greedily.

        Raises:
            Failure: an answer is an error, is short of tokens, or takes longer than ``timeout``.
        """

    def close(self) -> None:
        """End the process and all that it started."""
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
    """A server or a library, with weights of one kind.

    Attributes:
        name: unique among those that take part.
        transport: how requests reach it, for the table.
    """

    transport = "HTTP"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """What was installed."""

    @abstractmethod
    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        """What ``start`` loads: the checkpoint, or its conversion, kept in ``folder``."""

    @abstractmethod
    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        """Start it and return when it is ready.

        Raises:
            Failure: it ended, or is not ready in time.
        """

    @abstractmethod
    def weight_bytes(self, model: Path) -> int:
        """Bytes of weights that one decoded token reads."""

    def visits(self, columns: Sequence[Column]) -> list[list[Column]]:
        """The columns in groups, each measured in a process that is started for it."""
        return [list(columns)]


def spawn(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    piped: bool = False,
) -> subprocess.Popen[str]:
    """Start ``command`` in a process group of its own; what it says goes to ``log``.

    Nothing that was set to keep other programs from using all cores is handed on. With
    ``piped``, standard input and output are pipes for whoever calls.
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
    """Run a converter to its end.

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
        raise Failure(f"{Path(command[0]).name} failed: {last_words(log)}")


def installed(python: Path, *packages: str) -> dict[str, str]:
    """Versions of ``packages`` in the environment of that interpreter."""
    code = "import sys; from importlib.metadata import version\n"
    code += "for name in sys.argv[1:]: print(name, version(name))"
    try:
        output = subprocess.run(
            [python, "-c", code, *packages], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Failure(f"{python} does not have {', '.join(packages)}: {error}") from error
    return dict(line.split() for line in output.splitlines())


def last_words(log: Path) -> str:
    """The last line that says something, for a message of one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:200]


def interpreter(environment: Path) -> Path:
    """The Python of a virtual environment; an interpreter's own path is taken as it is."""
    return environment / "bin" / "python" if environment.is_dir() else environment
