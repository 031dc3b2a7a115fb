"""A server that a command starts for itself, waits for, and stops in any case."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_cli.errors import ExitCode, TgiError
from tgi_cli.process.parent_death import parent_pipe
from tgi_cli.process.spawn import child_environment, module_command

_GRACE_SECONDS = 5
_STOP_SECONDS = 40.0
_POLL_SECONDS = 0.05
_LAST_LINES = 3


@dataclass(frozen=True)
class ManagedServer:
    """A running server.

    Attributes:
        url: URL of the server.
        socket: Socket of its shard, or None if it has none.
        command: Command that started it.
        log: File with its log, one JSON object per line; removed with the server.
        process: Its process.
    """

    url: str
    socket: Path | None
    command: list[str]
    log: Path
    process: asyncio.subprocess.Process

    def failure(self) -> TgiError | None:
        """Why it ended, or None while it runs."""
        status = self.process.returncode
        return None if status is None else _failure(status, self.log, "")


@asynccontextmanager
async def start_server(
    model: str,
    arguments: Sequence[str] = (),
    *,
    shard: bool = False,
    environment: Mapping[str, str] | None = None,
    log_line: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[ManagedServer]:
    """Run ``tgi serve MODEL`` on a free port of 127.0.0.1 until the end of the block.

    Args:
        model: Model id or folder; empty for the bundled model.
        arguments: Additional arguments for ``tgi serve``.
        shard: Whether its model server opens a socket to be driven directly.
        environment: Variables added to those of this process.
        log_line: Called with the lines of its log during the start.

    Raises:
        TgiError: The server did not become ready; cause and remedy are its own if it logged them.
    """
    # Short, because the path of a socket has at most 100 bytes; private, because the socket
    # controls the model.
    folder = Path(tempfile.mkdtemp(prefix="tgi-server-"))
    log = folder / "server.log"
    command = ["serve", *([model] if model else []), "--port=0", "--hostname=127.0.0.1"]
    command.append(f"--graceful-termination-timeout={_GRACE_SECONDS}")
    command += [f"--shard-uds-path={folder / 'shard'}"] if shard else []
    command += ["--json-output", *arguments]
    process: asyncio.subprocess.Process | None = None
    pipe = contextlib.ExitStack()
    try:
        parent_fd = pipe.enter_context(parent_pipe())
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *module_command("tgi_cli", *command, f"--parent-fd={parent_fd}"),
                pass_fds=[parent_fd],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**child_environment(), **(environment or {})},
                start_new_session=True,  # Ctrl-C on the terminal is for this process
            )
        url = await _wait_until_ready(process, log, log_line)
        socket = folder / "shard-0" if shard else None
        yield ManagedServer(url, socket, ["tgi", *command], log, process)
    finally:
        if process is not None:
            await _stop(process)
        pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _wait_until_ready(
    process: asyncio.subprocess.Process, log: Path, log_line: Callable[[str], None]
) -> str:
    """Wait for the log line with the URL and return it. Raises TgiError."""
    rest = ""
    with log.open(encoding="utf-8", errors="replace") as file:
        while True:
            ended = process.returncode is not None
            *lines, rest = (rest + file.read()).split("\n")
            for line in lines:
                fields = _fields(line)
                message = str(fields.get("message", line))
                log_line(message)
                if message.startswith("ready: ") and isinstance(fields.get("url"), str):
                    return str(fields["url"])
            if ended:
                raise _failure(process.returncode or 0, log, " before it was ready")
            await asyncio.sleep(_POLL_SECONDS)


def _fields(line: str) -> dict[str, Any]:
    """The fields of a log line; empty if it is not JSON."""
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        if isinstance(value, dict) and isinstance(value.get("fields"), dict):
            return dict(value["fields"])
    return {}


def _failure(status: int, log: Path, when: str) -> TgiError:
    """The error with which the server ended; ``when`` completes the sentence that says so."""
    own = [kind for kind in TgiError.__subclasses__() if kind.__module__ == TgiError.__module__]
    kinds = {kind.exit_code: kind for kind in own}
    kind = kinds.get(ExitCode(status), TgiError) if status in set(ExitCode) else TgiError
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        fields = _fields(line)
        if "remedy" in fields:
            return kind(f"tgi serve: {fields.get('message')}", str(fields["remedy"]))
    last = " | ".join(str(_fields(line).get("message", line)) for line in lines[-_LAST_LINES:])
    cause = f"tgi serve ended with status {status}{when}"
    return kind(f"{cause}: {last}".removesuffix(": "))


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop the server, gracefully if possible."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            # Its model server and router end with their parent.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
