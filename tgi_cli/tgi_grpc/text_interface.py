"""What a front that is asked in text needs of whoever knows text, which stands above this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Output(Protocol):
    """The growing text of one sequence."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that this id completes, and whether a stop sequence is complete with it."""
        ...

    def text(self) -> str:
        """All of it, when no more ids come."""
        ...


class Texts(Protocol):
    """The tokenizer of one model. Any thread may call any method, one at a time.

    Attributes:
        special_ids: ids that are structure, not text.
    """

    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool, truncate: int) -> list[int]:
        """Ids of a prompt, of its end if it has more than ``truncate`` (0: no bound).

        Special tokens that are added in front stay there.
        """
        ...

    def surface(self, token_id: int) -> str:
        """The text of one id by itself."""
        ...

    def output(self, prompt_ids: Sequence[int], stop_sequences: Sequence[str]) -> Output:
        """The text that is to follow a prompt.

        Raises:
            ValueError: stop sequences that are too long, in words fit for the caller.
        """
        ...

    def grammar(self, kind: str, source: str) -> str:
        """A grammar as the engine takes it; ``kind`` is json or regex.

        Raises:
            ValueError: it cannot be, in words fit for the caller.
        """
        ...

    def close(self) -> None:
        """End what was started for it. May be called twice."""
        ...
