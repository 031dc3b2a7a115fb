"""A server of the chat's own for a model, with its progress on stderr while it starts."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tgi_cli.process.managed_server import ManagedServer, start_server
from tgi_cli.process.progress import INTERVAL_VARIABLE

_PROGRESS = re.compile(r"(?P<title>[^:]+): (?P<amount>.*) \((?P<percent>\d+)%\)(?P<rest>.*)")
"""A line of :class:`tgi_cli.process.progress.ProgressReporter`."""

_SECONDS = 0.5
"""Interval of lines of progress."""


@dataclass(frozen=True)
class OwnServer:
    """A server that ends with the chat.

    Attributes:
        server: the running server.
        api_key: the key that it requires, so that no other user of this machine can ask it.
    """

    server: ManagedServer
    api_key: str


@asynccontextmanager
async def own_server(model: str, arguments: Sequence[str]) -> AsyncIterator[OwnServer]:
    """Start ``tgi serve MODEL``, and stop it at the end of the block.

    Args:
        model: model id or folder; empty for the bundled model.
        arguments: additional arguments for ``tgi serve``.

    Raises:
        TgiError: the server's own reason for not becoming ready.
    """
    key = secrets.token_urlsafe(24)
    variables = {"API_KEY": key, INTERVAL_VARIABLE: str(_SECONDS)}
    async with contextlib.AsyncExitStack() as stack:
        with _progress(model or "the bundled model") as show_line:
            server = await stack.enter_async_context(
                start_server(model, arguments, environment=variables, log_line=show_line)
            )
        yield OwnServer(server, key)


@contextlib.contextmanager
def _progress(model: str) -> Iterator[Callable[[str], None]]:
    """A line with the progress of the start if stderr is a terminal, erased at the end."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"starting {model}", total=None, amount="")

        def show_line(line: str) -> None:
            found = _PROGRESS.fullmatch(line)
            if found is not None:
                amount = found["amount"] + found["rest"]
                bar.update(
                    task,
                    description=found["title"],
                    total=100,
                    completed=int(found["percent"]),
                    amount=amount,
                )
            elif bar.tasks[0].total is not None:
                bar.update(task, description=f"starting {model}", total=None, amount="")

        yield show_line
