"""The contract between drafters, which find drafts, and the speculator, which selects them."""

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
        shares: share of the votes for each token among those that followed before, at most 1.
    """

    source: DraftSource
    length: int
    token_ids: list[int]
    shares: list[float]


class Drafter(Protocol):
    """Finds drafts for one sequence after another."""

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """Up to ``most`` drafts after the sequence's known tokens, or None."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...
