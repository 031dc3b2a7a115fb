"""Decides how many drafts the worker's drafter with weights proposes, and how many are verified.

A look-up takes microseconds, a proposal one forward pass of the drafter per draft. So the number
of proposed drafts is decided beforehand, by how often the drafter was right at each position, and
the number of verified ones afterwards, by the drafter's confidence in each. The gain is checked
against the durations of steps: see :mod:`tgi_cli.engine.speculation.balance`.

A draft model computes a prompt only when it first drafts for the answer. It is asked to once drafts
are expected to save more time than that takes. The remaining length of an answer is estimated from
the lengths of others, or from its own if it is longer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.acceptance import (
    Acceptance,
    Averages,
    class_of,
    class_of_chance,
)
from tgi_cli.engine.speculation.answer_lengths import AnswerLengths
from tgi_cli.engine.speculation.balance import Balance
from tgi_cli.engine.speculation.draft_lengths import break_even, choose_lengths, saved_per_token
from tgi_cli.engine.speculation.step_costs import StepCosts, batch_class
from tgi_cli.engine.step import MAX_DRAFT_ROWS, Proposal, Step, StepTime

log = logging.getLogger(__name__)

PROBE_STEPS = 32
"""Steps without a proposal after which a sequence gets one along with others, to test whether its
drafts would be right."""

MAX_PROBE_STEPS = 1024
"""Limit of that number: each wrong proposal doubles it."""

LAG = 32
"""Tokens to catch up on from which a drafter's step counts as long: it does not tell what other
steps take."""

_WORTH = 1.25
"""Least time that drafts must save in the rest of an answer, as a multiple of the time to catch up:
both are estimates."""

RECENT = 512
"""Steps after the last gain for which the drafter follows, though nothing is proposed: numbers of
requests change, and heads cannot draft for a sequence of which they have missed a step."""

_TOLD_LOSSES = 3
"""Consecutive lost trials after which a message is logged."""

_UNKNOWN_CHANCE = 1.0
"""Used where the drafter gives no probability: only the position counts."""


@dataclass(slots=True)
class _Draftee:
    """A sequence that drafts are proposed for.

    Attributes:
        computed: the sequence's tokens that the drafter is taken to have computed.
        own: acceptance of its drafts.
        token_ids: the latest drafts, until the tokens that follow are known; empty for none.
        kinds: their classes.
        at: the number of the sequence's tokens then.
        without: steps since its last proposal.
        pause: such steps until the next one, while none is worth it.
    """

    computed: int
    own: Averages = field(default_factory=Averages)
    token_ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    at: int = 0
    without: int = 0
    pause: int = PROBE_STEPS


@dataclass(slots=True)
class _Current:
    """The step in progress.

    Attributes:
        proposed: sequences that the worker has proposed drafts for.
        verified, accepted: numbers of such drafts that were proposed earlier.
        lag: tokens that the drafter computes before it proposes, if they exceed :data:`LAG`.
    """

    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    lag: int = 0


class Proposals:
    """The proposals of one engine's worker.

    Args:
        most: most drafts of a sequence in one step.
        costs: predicts the durations of steps and of proposals.
        acceptance: estimates how likely drafts are right.
        most_lag: most tokens that a drafter computes in a step to catch up.

    Attributes:
        expected: whether the latest step that was scheduled ends with proposals.
    """

    def __init__(self, most: int, costs: StepCosts, acceptance: Acceptance, most_lag: int) -> None:
        self._most = most
        self._costs = costs
        self._acceptance = acceptance
        self._most_lag = most_lag
        self.expected = False
        self._answers = AnswerLengths()
        self._draftees: dict[int, _Draftee] = {}
        self._balances: dict[int, Balance] = {}
        self._step = _Current()
        self._verified = self._accepted = 0
        self._asked = 0
        self._gained_at: int | None = None
        self._told = False

    def ask(self, sequences: Many[Sequence], found: Many[float]) -> list[int] | None:
        """How many drafts are worth proposing for each; None if the drafter need not follow.

        Args:
            sequences: as :meth:`tgi_cli.engine.speculator.Speculator.ask` has them.
            found: tokens that drafts without weights are expected to give each of them.
        """
        lengths = self._lengths(sequences, found)
        self.expected = lengths is not None and any(lengths)
        return lengths

    def _lengths(self, sequences: Many[Sequence], found: Many[float]) -> list[int] | None:
        count = max(1, len(sequences))
        balance = self._balance(count)
        self._asked += bool(sequences)
        if balance.pause:
            balance.pause -= bool(sequences)
            return self._follow(sequences)
        context = sum(len(sequence.token_ids) for sequence in sequences) // count
        durations = self._durations(count, context)
        if break_even(count, durations) >= 1:
            return self._follow(sequences)
        costs = self._costs.of(count, context)
        plain = costs.seconds * self._costs.speed(count)

        def saved(row: list[float]) -> float:
            return plain * saved_per_token(count, row, durations)

        draftees = [self._draftee(sequence) for sequence in sequences]
        survivals, late = [], []
        for index, (sequence, draftee) in enumerate(zip(sequences, draftees, strict=True)):
            row = self._expected(draftee, sequence.max_tokens - sequence.num_tokens - 1)
            if sum(row) <= found[index]:
                row = []
            elif not self._is_worth_catching_up(sequence, draftee, saved(row)):
                row = []
                late.append(index)
            survivals.append(row)
        lengths = choose_lengths(survivals, durations) if sequences else []
        if any(lengths):
            self._probe(draftees, survivals, lengths)
        else:  # a trial with all sequences, which the balance ends
            lengths = [min(1, len(row)) for row in survivals]
        if late and not any(lengths):  # or with one, if drafts that are always right would pay
            index = max(late, key=lambda index: draftees[index].computed)
            best = saved([1.0] * self._most)
            if self._is_worth_catching_up(sequences[index], draftees[index], best):
                lengths[index] = 1
        self._catch_up(sequences, draftees, lengths)
        return lengths

    def _is_worth_catching_up(self, sequence: Sequence, draftee: _Draftee, saved: float) -> bool:
        """Whether drafts will save more than the drafter takes to compute what it lacks.

        Args:
            sequence: a sequence of the step.
            draftee: its state.
            saved: seconds that drafts save per token.
        """
        lag = len(sequence.token_ids) - draftee.computed
        if lag <= LAG or not self._costs.catches_up:
            return True
        if len(sequence.token_ids) <= sequence.prompt_tokens:
            return False  # do not delay its first token
        return saved * self._answers.left(sequence) > _WORTH * self._costs.catching_up(lag)

    def _catch_up(
        self, sequences: Many[Sequence], draftees: list[_Draftee], lengths: list[int]
    ) -> None:
        """Note what the drafter computes in this step, and defer what is too much.

        Args:
            sequences: sequences of the step.
            draftees: their states.
            lengths: the chosen numbers of drafts; changed in place.
        """
        left = self._most_lag
        for index, (sequence, draftee) in enumerate(zip(sequences, draftees, strict=True)):
            if not lengths[index]:
                continue
            lag = len(sequence.token_ids) - draftee.computed
            if lag > LAG:
                if self._costs.catches_up:
                    lag = min(lag, left)
                    left -= lag
                self._step.lag += lag
                lengths[index] = lengths[index] if lag else 0
            draftee.computed += lag

    def _follow(self, sequences: Many[Sequence]) -> list[int] | None:
        """No drafts, in a step that the drafter follows only if it was useful recently."""
        if self._gained_at is None or self._asked - self._gained_at > RECENT:
            return None
        return [0] * len(sequences)

    def _probe(
        self, draftees: list[_Draftee], survivals: list[list[float]], lengths: list[int]
    ) -> None:
        """Have a draft proposed where none was for long: along with others, it costs a row.

        Args:
            draftees: states of the step's sequences.
            survivals: survivals of their next drafts; empty where none is wanted.
            lengths: the chosen numbers of drafts; changed in place.
        """
        for index, draftee in enumerate(draftees):
            if lengths[index]:
                draftee.without, draftee.pause = 0, PROBE_STEPS
                continue
            draftee.without += 1
            if draftee.without >= draftee.pause and survivals[index]:
                draftee.without, lengths[index] = 0, 1
                draftee.pause = min(2 * draftee.pause, MAX_PROBE_STEPS)

    def _balance(self, sequences: int) -> Balance:
        return self._balances.setdefault(batch_class(sequences), Balance())

    def verified(self, drafts: int, accepted: int) -> None:
        """Count the proposed drafts of a sequence that the step in progress has verified."""
        self._step.verified += drafts
        self._step.accepted += accepted
        self._verified += drafts
        self._accepted += accepted

    def timed(self, step: Step, seconds: float, decodes: bool) -> bool:
        """Learn from a step that was applied; returns whether its duration is typical.

        Args:
            step: the step as it was scheduled.
            seconds: its duration.
            decodes: whether it only decoded.
        """
        current, self._step = self._step, _Current()
        if not decodes:
            return False
        asked, count = any(step.proposals), step.num_decodes
        if current.lag:
            rows, context = count + step.num_drafts, sum(step.starts) // count
            most = max(step.proposals, default=0)
            late = StepTime(count, rows, context, seconds, most, current.lag)
            self._costs.learn_catching_up(late)
            return False
        if not (asked or current.verified):
            return True
        costs = self._costs.of(count, sum(step.starts) // count)
        found = step.num_drafts - current.verified
        if found >= len(costs.durations):
            return True
        plain = costs.seconds * self._costs.speed(count)
        gain = costs.durations[found] + current.accepted / count - seconds / plain
        balance = self._balance(count)
        paused = balance.add(gain)
        if balance.is_full:
            self._gained_at = self._asked
        if paused and balance.losses == _TOLD_LOSSES and not self._told:
            self._told = True
            share = self._accepted / max(1, self._verified)
            text = (
                "drafts with weights take longer than they save with %d requests at once (%.0f %% "
                "of %d were accepted): they are paused, and tried again less and less often"
            )
            log.info(text, count, 100 * share, self._verified)
        return current.proposed > 0 or not asked

    def _durations(self, sequences: int, context: int) -> list[float]:
        """Seconds of a step with 0, 1, 2, ... draft rows that were proposed."""
        costs, most = self._costs.of(sequences, context), self._most
        plain = costs.seconds * self._costs.speed(sequences)
        rows = min(len(costs.durations) - 1, sequences * most, MAX_DRAFT_ROWS)
        proposing = [self._costs.proposing(sequences, drafts) for drafts in range(most + 1)]
        return [
            costs.durations[count] + proposing[-(-count // sequences)] / plain
            for count in range(rows + 1)
        ]

    def _draftee(self, sequence: Sequence) -> _Draftee:
        key = sequence.request.request_id
        draftee = self._draftees.get(key)
        if draftee is None:
            late = self._costs.catches_up
            # A prefix that is reused was probably computed by the drafter, too.
            computed = sequence.reused_tokens if late else sequence.prompt_tokens
            draftee = self._draftees[key] = _Draftee(computed)
        return draftee

    def _expected(self, draftee: _Draftee, most: int) -> list[float]:
        """The probabilities that each of the next drafts and all before it will be right."""
        count = min(self._most, most)
        kinds = [class_of(DraftSource.UNSEEN, 1 + index) for index in range(count)]
        return self._acceptance.survivals(draftee.own, kinds, [1.0] * count)

    def take(self, sequence: Sequence, proposal: Proposal) -> None:
        """Keep the drafts proposed after the sequence's known tokens."""
        self._step.proposed += 1
        self.settle(sequence)
        draftee = self._draftee(sequence)
        count = min(len(proposal.token_ids), self._most)
        chances = proposal.chances[:count] or [_UNKNOWN_CHANCE] * count
        draftee.token_ids = proposal.token_ids[:count]
        draftee.kinds = [class_of_chance(chance) for chance in chances]
        draftee.at = len(sequence.token_ids)

    def drafts(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """The drafts proposed after the sequence's last token, and their survivals."""
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
        """Learn from the tokens that followed the latest proposal, if any."""
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

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._answers.learn(sequence)
        self._draftees.pop(sequence.request.request_id, None)
