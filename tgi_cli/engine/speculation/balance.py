"""What proposals have gained, and pauses where that is a loss.

How many drafts are proposed follows from estimates: of acceptance, of the durations of steps and of
proposals. Where these are wrong, or leave out what the drafter costs (it reads
prompts, it follows steps whose drafts are not worth verifying), speculation would be slower than
none. So the durations of steps decide in the end: a step is worth the tokens that it gave, less the
time that it took, in steps without proposals of as many sequences. Where the sum says that a few
steps were lost, nothing is proposed and the drafter need not follow for a while, in which the
durations of plain steps are learnt anew. Then there is another trial, and each one that loses
doubles the pause. So a drafter that never pays costs less and less, and one that becomes right is
found out.
"""

from __future__ import annotations

from dataclasses import dataclass

CREDIT = 4.0
"""Steps that a trial may lose; and most that are remembered as gained, for what has paid for long
must not lose for as long."""

FIRST_PAUSE = 64
"""Steps without proposals after the first trial that has lost its credit."""

MAX_PAUSE = 8192
"""The same after many: trials then take a two-thousandth of the steps."""

_WORST = 2.0
"""Most steps that one may lose: longer ones have waited for other programs."""


@dataclass(slots=True)
class Balance:
    """Of steps of about one number of sequences.

    Attributes:
        pause: steps left without proposals.
        losses: trials in a row that have lost their credit.
    """

    pause: int = 0
    losses: int = 0
    _steps: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether as much was gained as is remembered."""
        return self._steps >= CREDIT

    def add(self, gain: float) -> bool:
        """Take in what a step with proposals has gained, in steps; returns whether a pause begins.

        Args:
            gain: at most as many as it gave tokens; below 0 for a loss.
        """
        self._steps = min(self._steps + max(gain, -_WORST), CREDIT)
        if self.is_full:
            self.losses = 0
        if self._steps > -CREDIT:
            return False
        self.pause = min(FIRST_PAUSE << min(self.losses, 16), MAX_PAUSE)
        self.losses += 1
        self._steps = 0.0
        return True
