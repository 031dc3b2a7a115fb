"""Proposes as many of the drafts that drafters find as make steps faster.

The tokens that follow show whether a draft was right, even if it was not verified. So estimates of
acceptance stay current while nothing is verified, and no step is spent on testing them. Estimates
of durations do not: where drafts would pay if rows were cheaper than they seem to be, a few are
verified to learn what they cost, within a share of the time. What neither accounts for is
limited by :mod:`tgi_cli.engine.speculation.balance`. Drafters with weights differ, since proposals
take time: see :mod:`tgi_cli.engine.speculation.proposals`.

Microseconds of :meth:`AdaptiveSpeculator.propose` on one 2025 server core, per sequence: 6 where
nothing matches, 8 to 25 where something does, 0.1 to 0.7 where no draft can pay or it pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.acceptance import Acceptance, Averages, class_of
from tgi_cli.engine.speculation.balance import MAX_FOUND_PAUSE, Balance
from tgi_cli.engine.speculation.draft_lengths import choose_lengths, gain
from tgi_cli.engine.speculation.drafter import Draft, Drafter
from tgi_cli.engine.speculation.look_ups import (
    LookUps,
    failing_budget,
    longest_pause,
    pause_after,
)
from tgi_cli.engine.speculation.proposals import Proposals
from tgi_cli.engine.speculation.step_costs import Costs, StepCosts, batch_class
from tgi_cli.engine.speculation.time_budget import TimeBudget
from tgi_cli.engine.step import GrammarMatcher, Proposal, Step, StepTime

_WEIGHTS = DraftSource.WEIGHTS.name.lower()

_NEW_REQUESTS = 0.25
"""Weight of an ended request in the failures that the next one begins with."""

_UNPAID_STEPS = 16
"""Steps for which nothing is expected to pay once no number of drafts does."""

_TRIALS, _TRIALS_AT_ONCE = 0.0025, 0.25
"""Share of the time that drafts which are not known to pay may be expected to lose, and what is
saved of it, in steps."""

_LEAST_TRIAL = 0.05
"""Least expected loss of a trial, in steps: no estimate is that certain."""


_Group = tuple[int, int, int]
"""What tells the sequences of one step from others: their number and first id, and the others'
number. Sequences that are scheduled and those of external steps take turns."""


def _group(sequences: Many[Sequence], others: int) -> _Group:
    return len(sequences), sequences[0].request.request_id, others


@dataclass(slots=True)
class _Draftee:
    """A sequence for which drafts are looked up.

    Attributes:
        look_ups: whether its look-ups are worth their costs.
        own: acceptance of its drafts.
        draft: the latest one, until the tokens that follow are known.
        at: the number of the sequence's tokens then.
        verified: how many of its drafts the step verified.
        price: time to verify them, in steps without drafts.
    """

    look_ups: LookUps
    own: Averages = field(default_factory=Averages)
    draft: Draft | None = None
    at: int = 0
    verified: int = 0
    price: float = 0.0


class AdaptiveSpeculator:
    """Implements :class:`tgi_cli.engine.speculator.Speculator`.

    Args:
        most: most drafts of a sequence in one step.
        costs: predicts the durations of steps.
        drafters: asked in this order, until one has drafts.
        clock: returns seconds, to measure look-ups.
        most_proposed: most drafts that the worker proposes for a sequence at once; 0 without a
            drafter that has weights.
        most_lag: most tokens that such a drafter computes in a step before it proposes.
    """

    def __init__(
        self,
        most: int,
        costs: StepCosts,
        drafters: Many[Drafter],
        clock: Callable[[], float] = time.perf_counter,
        most_proposed: int = 0,
        most_lag: int = 1 << 30,
    ) -> None:
        self._most = most
        self._costs = costs
        self._drafters = drafters
        self._clock = clock
        self._acceptance = Acceptance()
        self._draftees: dict[int, _Draftee] = {}
        self._failures = 0.0
        """Average failures of the look-ups of ended requests, which new ones begin with."""
        self._balances: dict[int, Balance] = {}
        """Of drafts that were looked up, by classes of the number of sequences."""
        self._failing = failing_budget()
        self._trials = TimeBudget(_TRIALS, _TRIALS_AT_ONCE)
        self._steps = 0
        """Number of steps that were applied."""
        self._quiet: tuple[_Group, int] | None = None
        """Sequences, and the first step before which one of them may get drafts."""
        self._accepted = 0
        """Of those in the step under way."""
        self._host = 0.0
        """Seconds that it has spent on proposing them."""
        self._proposals: Proposals | None = None
        if most_proposed:
            most_proposed = min(most, most_proposed)
            self._proposals = Proposals(most_proposed, costs, self._acceptance, most_lag)

    @property
    def asks_worker(self) -> bool:
        """See the protocol."""
        return self._proposals is not None

    def may_propose(self, sequences: Many[Sequence], others: int = 0) -> bool:
        """See the protocol. Takes 0.3 us."""
        count = len(sequences) + others
        if self._proposals is None:
            if self._balance(count).pause:
                return False
        elif self._proposals.expected:
            return True
        if self._quiet is None:
            return True
        group, due = self._quiet
        return self._steps >= due or group != _group(sequences, others)

    def propose(self, sequences: Many[Sequence], waiting: bool, others: int = 0) -> list[list[int]]:
        """See the protocol."""
        if not self.may_propose(sequences, others):
            return [[] for _ in sequences]
        count, group = len(sequences) + others, _group(sequences, others)
        context = sum(len(sequence.token_ids) for sequence in sequences) // len(sequences)
        costs = self._costs.of(count, context, waiting)
        if not costs.pay:
            # Steps with prompts are not learned from.
            wait = self._trials.wait if costs.may_pay and not waiting else _UNPAID_STEPS
            if wait:
                if not waiting:
                    self._quiet = group, self._steps + min(wait, _UNPAID_STEPS)
                return [[] for _ in sequences]
        began = self._clock()
        longest = longest_pause(count, costs.look_up)
        draftees = [self._draftee(sequence, costs) for sequence in sequences]
        looked_up = self._look_up_due(sequences, draftees, costs, longest)
        self._quiet = group, min(self._due(draftee, longest) for draftee in draftees)
        if looked_up or self._proposals is not None:
            proposals = self._choose(sequences, draftees, costs, others, not waiting)
        else:
            proposals = [[] for _ in sequences]
        self._host += self._clock() - began
        if looked_up:
            self._costs.looked_up((self._clock() - began) / looked_up)
        return proposals

    def _look_up_due(
        self, sequences: Many[Sequence], draftees: list[_Draftee], costs: Costs, longest: int
    ) -> int:
        """Look up the sequences that are due, as far as there is time; returns how many."""
        due = [i for i, each in enumerate(draftees) if each.look_ups.due(longest) <= self._steps]
        if len(due) > 1:  # those that have waited for longest first
            due.sort(key=lambda index: draftees[index].look_ups.at)
        looked_up = 0
        for index in due:
            look_ups = draftees[index].look_ups
            if not look_ups.failures or self._failing.spend(costs.look_up):
                looked_up += 1
                look_ups.at = self._steps
                self._look_up(sequences[index], draftees[index], costs)
        return looked_up

    def _due(self, draftee: _Draftee, longest: int) -> int:
        """Number of the first step before which a sequence may get drafts, or teaches something."""
        if draftee.draft is not None:  # what follows it is to be learned from
            return self._steps + 1
        due = draftee.look_ups.due(longest)
        return max(due, self._steps + self._failing.wait) if draftee.look_ups.failures else due

    def _balance(self, sequences: int) -> Balance:
        return self._balances.setdefault(batch_class(sequences), Balance(MAX_FOUND_PAUSE))

    def _choose(
        self,
        sequences: Many[Sequence],
        draftees: list[_Draftee],
        costs: Costs,
        others: int,
        teaches: bool,
    ) -> list[list[int]]:
        """The drafts that are worth verifying among those that were found or proposed.

        If the duration of the step ``teaches`` what rows cost, that counts as worth it at times.
        """
        drafts = [[] if each.draft is None else each.draft.token_ids for each in draftees]
        survivals = [self._survivals(draftee) for draftee in draftees]
        found = [True] * len(sequences)
        if self._proposals is not None:
            for index, sequence in enumerate(sequences):
                token_ids, chances = self._proposals.drafts(sequence)
                if sum(chances) > sum(survivals[index]):
                    drafts[index], survivals[index] = token_ids, chances
                    found[index] = False
        if not any(survivals):
            return [[] for _ in sequences]
        without: list[list[float]] = [[]] * others
        lengths = choose_lengths(survivals + without, costs.limits)
        if not any(lengths) and teaches and costs.may_pay and not self._trials.wait:
            lengths = choose_lengths(survivals + without, costs.hopes)
            expected = gain(survivals + without, lengths, costs.durations)
            # Also if none is worth a trial, so that what might be is not looked for in each step.
            self._trials.spend(max(_LEAST_TRIAL, 1.0 - expected))
        total = sum(lengths)
        price = (costs.durations[total] / costs.durations[0] - 1.0) / max(1, total)
        for index, (sequence, draftee) in enumerate(zip(sequences, draftees, strict=True)):
            length = lengths[index]
            drafts[index] = drafts[index][:length]
            if not length:
                continue
            draft = draftee.draft if found[index] else None
            source = DraftSource.WEIGHTS if draft is None else draft.source
            sequence.draft_source = source.name.lower()
            if draft is not None:
                draftee.verified, draftee.price = length, length * price
        return drafts

    def ask(self, sequences: Many[Sequence]) -> list[int] | None:
        """See the protocol."""
        assert self._proposals is not None
        found = []
        for sequence in sequences:
            draftee = self._draftees.get(sequence.request.request_id)
            # A sequence that repeats a text probably still does after the step.
            found.append(0.0 if draftee is None else sum(self._survivals(draftee)))
        return self._proposals.ask(sequences, found)

    def proposed(self, sequence: Sequence, proposal: Proposal) -> None:
        """See the protocol."""
        if self._proposals is not None:
            self._proposals.take(sequence, proposal)

    def _draftee(self, sequence: Sequence, costs: Costs) -> _Draftee:
        """The state of a sequence, after learning from its latest look-up."""
        key, tokens = sequence.request.request_id, sequence.token_ids
        draftee = self._draftees.get(key)
        if draftee is None:
            failures = int(self._failures)
            longest = longest_pause(costs.sequences, costs.look_up)
            look_ups = LookUps(self._steps - 1, failures, pause_after(failures, longest))
            draftee = self._draftees[key] = _Draftee(look_ups)
        elif draftee.draft is not None:
            self._settle(draftee, tokens, costs)
        if self._proposals is not None:
            self._proposals.settle(sequence)
        return draftee

    def _look_up(self, sequence: Sequence, draftee: _Draftee, costs: Costs) -> None:
        tokens = sequence.token_ids
        most = min(self._most, sequence.max_tokens - len(tokens) - 1)
        for drafter in self._drafters:
            draft = drafter.draft(sequence, most)
            if draft is not None and sequence.matcher is not None:
                draft = _allowed(draft, sequence.matcher)
            if draft is not None:
                draftee.draft, draftee.at = draft, len(tokens)
                return
        self._account(draftee, 0.0, False, costs)

    def _settle(self, draftee: _Draftee, tokens: list[int], costs: Costs) -> None:
        """Learn from what followed the latest draft."""
        draft, draftee.draft = draftee.draft, None
        assert draft is not None
        own, learn, length = draftee.own, self._acceptance.learn, draft.length
        followed = tokens[draftee.at : draftee.at + len(draft.token_ids)]
        right = 0
        for index, token in enumerate(followed):
            is_right = token == draft.token_ids[index]
            learn(own, class_of(draft.source, length + index), draft.shares[index], is_right)
            if not is_right:
                break
            right += 1
        accepted = min(right, draftee.verified)
        first = self._acceptance.chance(own, class_of(draft.source, length), draft.shares[0])
        promising = right > 0 and first >= costs.break_even
        self._account(draftee, accepted / costs.sequences - draftee.price, promising, costs)
        draftee.verified, draftee.price = 0, 0.0

    def _account(self, draftee: _Draftee, gain: float, promising: bool, costs: Costs) -> None:
        longest = longest_pause(costs.sequences, costs.look_up)
        draftee.look_ups.settle(gain, costs.look_up, promising, longest)

    def _survivals(self, draftee: _Draftee) -> list[float]:
        """The chances that each of its drafts and all before it are right."""
        draft = draftee.draft
        if draft is None:
            return []
        first, count = draft.length, len(draft.shares)
        kinds = [class_of(draft.source, length) for length in range(first, first + count)]
        return self._acceptance.survivals(draftee.own, kinds, draft.shares)

    def learn(self, sequence: Sequence, drafts: Many[int], accepted: int) -> None:
        """See the protocol. Look-ups learn from the tokens that follow instead."""
        if self._proposals is not None and sequence.draft_source == _WEIGHTS:
            self._proposals.verified(len(drafts), accepted)
        self._accepted += accepted

    def finish(self, sequence: Sequence) -> None:
        """See the protocol."""
        self._quiet = None  # another sequence may take its place
        draftee = self._draftees.pop(sequence.request.request_id, None)
        if draftee is not None:
            self._failures += _NEW_REQUESTS * (draftee.look_ups.failures - self._failures)
        if self._proposals is not None:
            self._proposals.finish(sequence)
        for drafter in self._drafters:
            drafter.finish(sequence)

    def timed(self, step: Step, seconds: float) -> None:
        """See the protocol."""
        count = step.num_decodes
        self._steps += 1
        if count:
            balance = self._balance(count)
            balance.pause -= balance.pause > 0
            self._failing.earn()
            self._trials.earn()
        others = step.new or step.num_prefill_tokens or step.encodes
        decodes = 0 < count == len(step.rows) and not others
        accepted, self._accepted = self._accepted, 0
        host, self._host = self._host, 0.0
        if self._proposals is not None and not self._proposals.timed(step, seconds, decodes):
            return
        if not decodes:
            return
        context, asked = sum(step.starts) // count, step.proposals
        if self._proposals is None and step.num_drafts:
            plain = self._costs.of(count, context).seconds * self._costs.speed(count)
            self._balance(count).add(1.0 + accepted / count - seconds / plain)
        if asked and all(asked):
            rows = count + step.num_drafts
            timed = StepTime(count, rows, context, seconds - host, max(asked))
            self._costs.learn_proposing(timed)
        elif not any(asked):
            self._costs.learn(count, step.num_drafts, context, seconds - host)


def _allowed(draft: Draft, matcher: GrammarMatcher) -> Draft | None:
    """The drafts up to the first that the grammar does not allow."""
    count = matcher.num_allowed(draft.token_ids)
    if count == len(draft.token_ids):
        return draft
    token_ids, shares = draft.token_ids[:count], draft.shares[:count]
    return Draft(draft.source, draft.length, token_ids, shares) if count else None
