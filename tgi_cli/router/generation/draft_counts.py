"""Counts the draft tokens that the engine has verified for one sequence."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_cli.engine.messages import VerifiedDrafts


class DraftCounts:
    """Totals of one sequence.

    Attributes:
        drafted: Draft tokens verified.
        accepted: Those that are part of the answer.
        rejected_prediction: Tokens of the prediction that were verified and refused. They cost a
            share of a step, and are not part of the answer.
        by_source: The first two of each source that drafts came from.
    """

    __slots__ = ("_last", "accepted", "by_source", "drafted", "rejected_prediction")

    def __init__(self) -> None:
        self.drafted = self.accepted = self.rejected_prediction = 0
        self.by_source: dict[str, tuple[int, int]] = {}
        self._last: VerifiedDrafts | None = None

    @property
    def accepted_prediction(self) -> int:
        """Number of accepted drafts that were taken from the request's prediction."""
        return self.by_source.get("prediction", (0, 0))[1]

    def take(self, steps: Iterable[VerifiedDrafts]) -> None:
        """Add what steps have verified."""
        for verified in steps:
            self._add(verified.source, verified.drafted, verified.accepted)
            if verified.predicted:
                self.rejected_prediction += verified.drafted - verified.accepted
            self._last = verified

    def drop(self, tokens: int) -> None:
        """The answer ends at a stop string, before the last ``tokens`` tokens of the last step."""
        last = self._last
        if last is None or tokens < 2:
            return  # the last token of a step is not a draft
        self._add(last.source, 0, -min(tokens - 1, last.accepted))

    def _add(self, source: str, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        before = self.by_source.get(source, (0, 0))
        self.by_source[source] = (before[0] + drafted, before[1] + accepted)
