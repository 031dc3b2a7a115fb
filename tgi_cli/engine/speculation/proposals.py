"""What the worker's drafter, which has weights, is asked for, and what becomes of its proposals.

A look-up takes microseconds, a proposal as many forward passes of the drafter as it has drafts. So
it is decided beforehand how many are worth their time, by how often the drafter was right at each
position, and afterwards how many of them are verified, by how sure it is of each.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.acceptance import (
    Acceptance,
    Averages,
    DraftSource,
    class_of,
    class_of_chance,
)
from tgi_cli.engine.speculation.draft_lengths import choose_lengths, may_pay
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import MAX_DRAFT_ROWS, Proposal

PROBE_STEPS = 32
"""Steps without a proposal after which a sequence gets one, to learn whether it would be right."""

MAX_PROBE_STEPS = 1024
"""The same, after many that were wrong: each doubles it."""

_UNKNOWN_CHANCE = 1.0
"""In place of a chance that the drafter does not tell: its position alone counts."""


@dataclass(slots=True)
class _Draftee:
    """A sequence that drafts are proposed for.

    Attributes:
        own: how its drafts fared.
        token_ids: the latest ones, until it is known what follows; empty for none.
        kinds: their classes.
        at: the number of the sequence's tokens then.
        without: steps since it was asked for.
        pause: such steps until the next one, where none is worth it.
    """

    own: Averages = field(default_factory=Averages)
    token_ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    at: int = 0
    without: int = 0
    pause: int = PROBE_STEPS


class Proposals:
    """The proposals of one engine's worker.

    Args:
        most: drafts of a sequence in one step.
        costs: predicts the durations of steps and of proposals.
        acceptance: estimates how likely drafts are right.
    """

    def __init__(self, most: int, costs: StepCosts, acceptance: Acceptance) -> None:
        self._most = most
        self._costs = costs
        self._acceptance = acceptance
        self._draftees: dict[int, _Draftee] = {}

    def ask(self, sequences: Many[Sequence], found: Many[float]) -> list[int] | None:
        """How many drafts are worth being proposed, for each; None if none could be for any.

        Args:
            sequences: as :meth:`tgi_cli.engine.speculator.Speculator.ask` has them.
            found: tokens that drafts without weights are expected to give each of them.
        """
        count = max(1, len(sequences))
        context = sum(len(sequence.token_ids) for sequence in sequences) // count
        durations = self._durations(count, context)
        if not may_pay(count, durations):
            return None
        draftees = [self._draftee(sequence) for sequence in sequences]
        survivals = []
        for sequence, draftee, expected in zip(sequences, draftees, found, strict=True):
            row = self._expected(draftee, sequence.max_tokens - sequence.num_tokens - 1)
            survivals.append([] if sum(row) <= expected else row)
        lengths = choose_lengths(survivals, durations) if sequences else []
        for index, draftee in enumerate(draftees):
            if lengths[index]:
                draftee.without = 0
                continue
            draftee.without += 1
            if draftee.without >= draftee.pause and survivals[index]:
                draftee.without, lengths[index] = 0, 1
                draftee.pause = min(2 * draftee.pause, MAX_PROBE_STEPS)
        return lengths

    def _durations(self, sequences: int, context: int) -> list[float]:
        """Of a step with 0, 1, 2, ... draft rows that were proposed."""
        costs, most = self._costs.of(sequences, context), self._most
        rows = min(len(costs.durations) - 1, sequences * most, MAX_DRAFT_ROWS)
        proposing = [self._costs.proposing(sequences, drafts) for drafts in range(most + 1)]
        return [
            costs.durations[count] + proposing[-(-count // sequences)] / costs.seconds
            for count in range(rows + 1)
        ]

    def _draftee(self, sequence: Sequence) -> _Draftee:
        return self._draftees.setdefault(sequence.request.request_id, _Draftee())

    def _expected(self, draftee: _Draftee, most: int) -> list[float]:
        """The chances that each of the next drafts and all before it will be right."""
        count = min(self._most, most)
        kinds = [class_of(DraftSource.UNSEEN, 1 + index) for index in range(count)]
        return self._acceptance.survivals(draftee.own, kinds, [1.0] * count)

    def take(self, sequence: Sequence, proposal: Proposal) -> None:
        """Keep what was proposed behind the sequence's known tokens."""
        self.settle(sequence)
        draftee = self._draftee(sequence)
        count = min(len(proposal.token_ids), self._most)
        chances = proposal.chances[:count] or [_UNKNOWN_CHANCE] * count
        draftee.token_ids = proposal.token_ids[:count]
        draftee.kinds = [class_of_chance(chance) for chance in chances]
        draftee.at = len(sequence.token_ids)

    def drafts(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """What was proposed behind the sequence's last token, and the drafts' survivals."""
        draftee = self._draftees.get(sequence.request.request_id)
        if draftee is None or draftee.at != len(sequence.token_ids):
            return [], []
        token_ids, matcher = draftee.token_ids, sequence.matcher
        if matcher is not None and token_ids:
            token_ids = token_ids[: matcher.num_allowed(token_ids)]
        count = len(token_ids)
        kinds = draftee.kinds[:count]
        return token_ids, self._acceptance.survivals(draftee.own, kinds, [1.0] * count)

    def settle(self, sequence: Sequence) -> None:
        """Learn from what followed the latest proposal, if anything has."""
        draftee = self._draftees.get(sequence.request.request_id)
        if draftee is None or draftee.at >= len(sequence.token_ids):
            return
        drafts, draftee.token_ids = draftee.token_ids, []
        tokens = sequence.token_ids[draftee.at : draftee.at + len(drafts)]
        learn, own = self._acceptance.learn, draftee.own
        for index, token in enumerate(tokens):
            right = token == drafts[index]
            learn(own, draftee.kinds[index], 1.0, right)
            learn(own, class_of(DraftSource.UNSEEN, 1 + index), 1.0, right)
            if not right:
                return
            draftee.pause = PROBE_STEPS

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._draftees.pop(sequence.request.request_id, None)
