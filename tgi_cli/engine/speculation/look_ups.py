"""When a sequence is looked up, from what its look-ups have gained and what they cost.

A look-up takes tens of microseconds of the host. Beside a step of ten milliseconds that is nothing;
of a small model's step of one it is a few percent, which is lost wherever drafts are not verified.
So a sequence whose look-ups have gained less than they cost pauses between them, for longer each
time, until those that gain nothing take at most :data:`FUTILE` of the time.

Gains and costs are in steps without drafts of as many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PAUSE = 15
"""Most steps in a row in which a sequence is not looked up."""

FUTILE = 0.005
"""Share of a step that look-ups which gain nothing may take."""

_MEMORY = 0.9
"""What is left of a balance after another look-up."""

_MOST = 2.0
"""Limit of a balance: what has gained much must not go on for long when it gains nothing more."""


@dataclass(slots=True)
class LookUps:
    """Those of one sequence.

    Attributes:
        failures: look-ups since the last time that they were worth their costs.
        pause: steps until the next one.
    """

    failures: int = 0
    pause: int = 0
    _balance: float = 0.0

    def settle(self, gain: float, cost: float, right: bool, longest: int) -> None:
        """Take in what the latest look-up has come to.

        Args:
            gain: tokens gained, as a share of those that a step gives, less the time that verifying
                drafts has added to the step.
            cost: of the look-up.
            right: whether its first draft was right, verified or not.
            longest: most steps to pause; see :func:`longest_pause`.
        """
        self._balance = min(self._balance * _MEMORY + gain - cost, _MOST)
        if self._balance >= 0:
            self.failures = 0
        elif right:
            self.failures //= 2
        else:
            self.failures = min(self.failures + 1, MAX_PAUSE)
        self.pause = min(self.failures, longest)


def longest_pause(sequences: int, cost: float) -> int:
    """Steps between two look-ups that gain nothing.

    Args:
        sequences: of a step.
        cost: of looking one of them up.
    """
    return min(MAX_PAUSE, int(sequences * cost / FUTILE))
