"""The contract between what finds drafts and what decides how many of them are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence.

    Attributes:
        source: where they come from.
        length: tokens that match before the first of them, at least 1; see
            :func:`tgi_cli.engine.speculation.acceptance.class_of`.
        token_ids: in order.
        shares: how sure the drafter is of each among the tokens that it knows, at most 1.
    """

    source: DraftSource
    length: int
    token_ids: list[int]
    shares: list[float]


class Drafter(Protocol):
    """Finds drafts for one sequence after another."""

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """Up to ``most`` drafts behind the sequence's known tokens, or None."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """The sequence, of which drafts may have been asked for, has ended."""
        ...
