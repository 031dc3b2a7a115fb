"""A server of this run's own: started, waited for, stopped whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_cli import errors
from tgi_cli.errors import ExitCode, TgiError
from tgi_cli.process.parent_death import parent_pipe
from tgi_cli.process.spawn import child_environment, module_command

_GRACE_SECONDS = 5
_STOP_SECONDS = 40.0
_LOOK = 0.05
_LAST_LINES = 3


@dataclass(frozen=True)
class ManagedServer:
    """A server that runs.

    Attributes:
        url: where it serves.
        socket: of its shard, where one was asked for.
        command: that started it.
        log: file that has what it wrote, one JSON object a line; gone with the server.
    """

    url: str
    socket: Path | None
    command: list[str]
    log: Path


@asynccontextmanager
async def start_server(
    model: str,
    arguments: Sequence[str] = (),
    *,
    shard: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[ManagedServer]:
    """``tgi serve MODEL`` on a free port of 127.0.0.1, ready; ended with the block.

    Args:
        model: an id or a folder; empty: the bundled model.
        arguments: more for ``tgi serve``.
        shard: give its model server a socket that can be driven directly.
        say: gets its log's lines while it starts, for people to read.

    Raises:
        TgiError: it did not become ready; cause and remedy are its own where it said them.
    """
    # Short, because a socket's path may have 100 bytes; private, because it commands the model.
    folder = Path(tempfile.mkdtemp(prefix="tgi-bench-"))
    log = folder / "server.log"
    told = ["serve", *([model] if model else []), "--port=0", "--hostname=127.0.0.1"]
    told.append(f"--graceful-termination-timeout={_GRACE_SECONDS}")
    if shard:
        told.append(f"--shard-uds-path={folder / 'shard'}")
    told += ["--json-output", *arguments]
    process: asyncio.subprocess.Process | None = None
    pipe = contextlib.ExitStack()
    try:
        parent_fd = pipe.enter_context(parent_pipe())
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *module_command("tgi_cli", *told, f"--parent-fd={parent_fd}"),
                pass_fds=[parent_fd],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C on the terminal is the run's to handle
            )
        url = await _ready(process, log, say)
        socket = folder / "shard-0" if shard else None
        yield ManagedServer(url, socket, ["tgi", *told], log)
    finally:
        if process is not None:
            await _stopped(process)
        pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _ready(process: asyncio.subprocess.Process, log: Path, say: Callable[[str], None]) -> str:
    """The URL of the line that says so. Raises TgiError."""
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = _lines(file)
        while True:
            over = process.returncode is not None
            for line in lines:
                if line is None:
                    break
                fields = _fields(line)
                message = str(fields.get("message", line))
                say(message)
                if message.startswith("ready: ") and isinstance(fields.get("url"), str):
                    return str(fields["url"])
            if over:
                raise _failure(process.returncode or 0, log)
            await asyncio.sleep(_LOOK)


def _lines(file: Any) -> Iterator[str | None]:
    """Whole lines as they are written; None: there are no more for now."""
    rest = ""
    while True:
        rest += file.read()
        *whole, rest = rest.split("\n")
        yield from whole
        yield None


def _fields(line: str) -> dict[str, Any]:
    """What a line of the log says; of one that is no JSON, nothing."""
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        if isinstance(value, dict) and isinstance(value.get("fields"), dict):
            return dict(value["fields"])
    return {}


def _failure(status: int, log: Path) -> TgiError:
    """The error that it ended with, in its own words."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    kinds = {
        kind.exit_code: kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, TgiError)
        and kind in TgiError.__subclasses__()
    }
    kind = kinds.get(ExitCode(status), TgiError) if status in set(ExitCode) else TgiError
    for line in reversed(lines):
        fields = _fields(line)
        if "remedy" in fields:
            return kind(f"tgi serve: {fields.get('message')}", str(fields["remedy"]))
    last = [str(_fields(line).get("message", line)) for line in lines[-_LAST_LINES:]]
    said = f": {' | '.join(last)}" if last else ""
    return kind(f"tgi serve ended with status {status} before it was ready{said}")


async def _stopped(process: asyncio.subprocess.Process) -> None:
    """End it in order, and in any case."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            # Its model server and router exit with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
