"""What comes out of a generation, before an API writes it down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from tgi_cli.engine.messages import FinishReason


class Token(msgspec.Struct, gc=False):
    """A generated token as TGI shows it; ``text`` is what it adds to the text."""

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(slots=True)
class Finish:
    """How a generation ended: the whole text, and why."""

    reason: FinishReason
    text: str
    generated_tokens: int


@dataclass(slots=True)
class Delta:
    """What became known of a generation: its new tokens, the text that may be shown, its end.

    ``top_tokens`` is parallel to ``tokens``, and empty when none were asked for.
    """

    index: int
    tokens: list[Token]
    top_tokens: list[list[Token]]
    text: str
    finish: Finish | None


class DeltaSource(Protocol):
    """Something that generates deltas and holds places while it does."""

    def __aiter__(self) -> DeltaSource: ...

    async def __anext__(self) -> Delta: ...

    def close(self) -> None:
        """Stop, and free everything. Idempotent."""
        ...
