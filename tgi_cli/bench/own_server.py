"""A server of this run's own: started, waited for, stopped whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OwnServer:
    """A server that runs.

    Attributes:
        url: where it serves.
        socket: of its shard, where one was asked for.
        command: that started it.
        log: file that has what it wrote.
    """

    url: str
    socket: Path | None
    command: list[str]
    log: Path


@asynccontextmanager
async def own_server(
    model: str,
    arguments: Sequence[str] = (),
    *,
    shard: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[OwnServer]:
    """``tgi serve MODEL`` on a free port of 127.0.0.1, ready; ended with the block.

    Args:
        model: an id or a folder; empty: the bundled model.
        arguments: more for ``tgi serve``.
        shard: give its model server a socket that can be driven directly.
        say: gets its log's lines while it starts, for people to read.

    Raises:
        TgiError: it did not become ready; cause and remedy are its own where it said them.
    """
    raise NotImplementedError
    yield
