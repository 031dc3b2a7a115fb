"""Counts the draft tokens that the engine has verified for one sequence."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_cli.engine.messages import VerifiedDrafts


class DraftCounts:
    """Totals of one sequence.

    Attributes:
        drafted: Draft tokens verified.
        accepted: Those that are part of the answer.
        accepted_prediction: Those of the accepted that were taken from the request's prediction.
        rejected_prediction: Tokens of the prediction that were verified and refused. They cost a
            share of a step, and are not part of the answer.
    """

    __slots__ = ("_last", "accepted", "accepted_prediction", "drafted", "rejected_prediction")

    def __init__(self) -> None:
        self.drafted = self.accepted = 0
        self.accepted_prediction = self.rejected_prediction = 0
        self._last: VerifiedDrafts | None = None

    def take(self, steps: Iterable[VerifiedDrafts]) -> None:
        """Add what steps have verified."""
        for verified in steps:
            self.drafted += verified.drafted
            self.accepted += verified.accepted
            if verified.predicted:
                self.accepted_prediction += verified.accepted
                self.rejected_prediction += verified.drafted - verified.accepted
            self._last = verified

    def drop(self, tokens: int) -> None:
        """The answer ends at a stop string, before the last ``tokens`` tokens of the last step."""
        last = self._last
        if last is None or tokens < 2:
            return  # the last token of a step is not a draft
        behind = min(tokens - 1, last.accepted)
        self.accepted -= behind
        if last.predicted:
            self.accepted_prediction -= behind
