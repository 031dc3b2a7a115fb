"""Sums up what proposals have gained, and pauses them where that is a loss.

The number of proposed drafts follows from estimates of acceptance and of the durations of steps and
proposals. If these are wrong, or omit costs of the drafter (which also reads prompts, and follows
steps whose drafts are not worth verifying), speculation would be slower than none. So measured
durations decide: the gain of a step is its number of tokens, less its time, in units of steps
without proposals with as many sequences. When a few steps have been lost in total, nothing is
proposed for a while and the drafter need not follow, while the durations of plain steps are
measured again. Then another trial begins; each one that loses doubles the pause. So the cost of a
drafter that never pays vanishes, and one that begins to pay is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

CREDIT = 4.0
"""Steps that a trial may lose. Also the limit of the gain that is remembered, so that proposals
which have paid for long do not lose for as long."""

FIRST_PAUSE = 64
"""Steps without proposals after the first trial that has lost its credit."""

MAX_PAUSE = 8192
"""Limit of the pause: trials then take a two-thousandth of the steps."""

MAX_FOUND_PAUSE = 512
"""The same for drafts that are looked up: every request may bring a text that repeats itself."""

_WORST = 2.0
"""Limit of the loss of one step: longer steps have waited for other programs."""


@dataclass(slots=True)
class Balance:
    """The balance of steps with similar numbers of sequences.

    Attributes:
        longest: most steps of a pause.
        pause: steps left without proposals.
        losses: trials in a row that have lost their credit.
    """

    longest: int = MAX_PAUSE
    pause: int = 0
    losses: int = 0
    _steps: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the gain has reached its limit."""
        return self._steps >= CREDIT

    def add(self, gain: float) -> bool:
        """Add the gain of a step with proposals; returns whether a pause begins.

        Args:
            gain: in steps, at most the step's number of tokens; negative for a loss.
        """
        self._steps = min(self._steps + max(gain, -_WORST), CREDIT)
        if self.is_full:
            self.losses = 0
        if self._steps > -CREDIT:
            return False
        self.pause = min(FIRST_PAUSE << min(self.losses, 16), self.longest)
        self.losses += 1
        self._steps = 0.0
        return True
