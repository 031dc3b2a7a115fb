"""When a sequence is looked up, by what its look-ups have gained and cost.

A look-up takes the host tens of microseconds. That is negligible beside a step of ten milliseconds,
and a few percent of a small model's step of one, which is lost if no drafts are verified. So a
sequence whose look-ups have gained less than they cost pauses between them, twice as long each
time, until look-ups without gain take at most :data:`FUTILE` of the time.

Pauses end at multiples of powers of two, counted in steps of the engine, so that many sequences are
due in the same steps and none in those between, which then cost nothing: a GPU's next step is
launched without waiting for the tokens of the one before. Code that is in the CPU's caches is
faster, too. What look-ups of pausing sequences take together is limited by
:func:`failing_budget`, so that many short answers, or steps that are short beside a look-up, do not
lose more.

Gains and costs are in steps without drafts of as many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from tgi_cli.engine.speculation.time_budget import TimeBudget

MAX_PAUSE = 63
"""Most steps in a row in which a sequence is not looked up."""

FUTILE = 0.0025
"""Share of a step that look-ups which gain nothing may take."""

_FAILING, _FAILING_AT_ONCE = 2 * FUTILE, 0.1
"""Share of the time that look-ups of sequences whose latest ones have failed may take together, and
what is saved of it, in steps."""

_MEMORY = 0.9
"""Factor of a balance for each further look-up."""

_MOST = 2.0
"""Limit of a balance, so that look-ups stop soon after they cease to gain."""

_MOST_FAILURES = MAX_PAUSE.bit_length()


@dataclass(slots=True)
class LookUps:
    """The look-ups of one sequence.

    Attributes:
        at: number of the step before which it was last looked up; at first, of the one before it
            came.
        failures: look-ups since the last one that was worth its cost.
        pause: most steps until the next one: 0, 1, 3, 7, ...
    """

    at: int = -1
    failures: int = 0
    pause: int = 0
    _balance: float = 0.0

    def due(self, longest: int) -> int:
        """Number of the first step before which the sequence is looked up again.

        Args:
            longest: most steps to pause; see :func:`longest_pause`.
        """
        return (self.at | min(self.pause, longest)) + 1

    def settle(self, gain: float, cost: float, promising: bool, longest: int) -> None:
        """Account for the latest look-up.

        Args:
            gain: tokens gained, as a share of those that a step gives, less the time that verifying
                drafts has added to the step.
            cost: cost of the look-up.
            promising: whether its first draft was right, verified or not, and such drafts are
                likely enough to be worth verifying.
            longest: as above.
        """
        self._balance = min(self._balance * _MEMORY + gain - cost, _MOST)
        if self._balance >= 0:
            self.failures = 0
        elif promising:
            self.failures //= 2
        else:
            self.failures = min(self.failures + 1, _MOST_FAILURES)
        self.pause = pause_after(self.failures, longest)


def pause_after(failures: int, longest: int) -> int:
    """Steps to pause after so many failures in a row: 0, 1, 3, 7, ... up to ``longest``."""
    return min((1 << failures) - 1, longest)


def longest_pause(sequences: int, cost: float) -> int:
    """Steps between two look-ups that gain nothing: 0, 1, 3, 7, ... up to :data:`MAX_PAUSE`.

    Args:
        sequences: number of sequences in a step.
        cost: cost of a look-up.
    """
    needed = min(MAX_PAUSE, int(sequences * cost / FUTILE))
    return (1 << needed.bit_length()) - 1


def failing_budget() -> TimeBudget:
    """The time for look-ups of sequences whose latest ones have failed."""
    return TimeBudget(_FAILING, _FAILING_AT_ONCE)
