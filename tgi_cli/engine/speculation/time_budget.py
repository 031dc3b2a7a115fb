"""Limits the time that is spent on what may gain nothing, to a share of all time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TimeBudget:
    """A share of the time of steps, which may be saved up to a limit and overdrawn once.

    Attributes:
        share: what each step adds, as a share of its duration.
        limit: most time that is saved, in steps.
        credit: the time that is left, in steps; at first the limit.
    """

    share: float
    limit: float
    credit: float = 0.0

    def __post_init__(self) -> None:
        self.credit = self.limit

    def earn(self) -> None:
        """Add the share of a step."""
        self.credit = min(self.credit + self.share, self.limit)

    def spend(self, cost: float) -> bool:
        """Whether there is time left, of which ``cost`` steps are then taken."""
        if self.credit <= 0:
            return False
        self.credit -= cost
        return True

    @property
    def wait(self) -> int:
        """Steps until there is time left."""
        return 0 if self.credit > 0 else int(-self.credit / self.share) + 1
