"""The output of generations, before an API formats it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from tgi_cli.engine.messages import FinishReason


class Token(msgspec.Struct, gc=False):
    """A generated token as in TGI's API; ``text`` is what it adds to the text."""

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(slots=True)
class Finish:
    """The end of a generation: its finish reason, its whole text, and the stop string found."""

    reason: FinishReason
    text: str
    generated_tokens: int
    stop: str | None = None


@dataclass(slots=True)
class Delta:
    """New tokens of a generation, the text that they add, and its end.

    ``top_tokens`` is parallel to ``tokens``, or empty if not requested.
    """

    index: int
    tokens: list[Token]
    top_tokens: list[list[Token]]
    text: str
    finish: Finish | None


class DeltaSource(Protocol):
    """An iterator over deltas that holds resources until it is closed."""

    def __aiter__(self) -> DeltaSource: ...

    async def __anext__(self) -> Delta: ...

    def close(self) -> None:
        """Cancel and release everything. Idempotent."""
        ...
