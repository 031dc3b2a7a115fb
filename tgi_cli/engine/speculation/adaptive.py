"""Proposes drafts of what drafters find, as many as steps get faster by.

What follows a draft tells whether it was right, whether it was verified or not. So the estimates
stay current while nothing is verified, and no step is spent on finding out whether it would pay.
Drafts with weights are another matter, since proposing them takes time: see
:mod:`tgi_cli.engine.speculation.proposals`.

Microseconds of :meth:`AdaptiveSpeculator.propose` on one 2025 server core, per sequence: 6 where
nothing matches, 8 to 25 where something does, 0.1 to 0.7 where no draft can pay.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.acceptance import Acceptance, Averages, DraftSource, class_of
from tgi_cli.engine.speculation.draft_lengths import choose_lengths
from tgi_cli.engine.speculation.drafter import Draft, Drafter
from tgi_cli.engine.speculation.proposals import Proposals
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import GrammarMatcher, Proposal, Step, StepTime

MAX_IDLE = 7
"""Most steps in a row in which a sequence is not looked up, once what it finds is not verified."""

_IDLE_AFTER = 8
"""Such look-ups after which it pauses for a step, and for one more each time."""


@dataclass(slots=True)
class _Draftee:
    """A sequence that drafts are looked up for.

    Attributes:
        own: how its drafts fared.
        draft: the latest one, until it is known what follows.
        at: the number of the sequence's tokens then.
        unused: look-ups in a row whose drafts were not verified.
        idle: steps until the next look-up.
    """

    own: Averages = field(default_factory=Averages)
    draft: Draft | None = None
    at: int = 0
    unused: int = 0
    idle: int = 0


class AdaptiveSpeculator:
    """Implements :class:`tgi_cli.engine.speculator.Speculator`.

    Args:
        most: drafts of a sequence in one step.
        costs: predicts the durations of steps.
        drafters: asked in this order, until one has drafts.
        most_proposed: drafts that the worker proposes for a sequence at once; 0 if its drafter has
            no weights.
    """

    def __init__(
        self, most: int, costs: StepCosts, drafters: Many[Drafter], most_proposed: int = 0
    ) -> None:
        self._most = most
        self._costs = costs
        self._drafters = drafters
        self._acceptance = Acceptance()
        self._draftees: dict[int, _Draftee] = {}
        self._proposals: Proposals | None = None
        if most_proposed:
            self._proposals = Proposals(min(most, most_proposed), costs, self._acceptance)

    @property
    def asks_worker(self) -> bool:
        """See the protocol."""
        return self._proposals is not None

    def propose(self, sequences: Many[Sequence], waiting: bool) -> list[list[int]]:
        """See the protocol."""
        count = len(sequences)
        context = sum(len(sequence.token_ids) for sequence in sequences) // count
        costs = self._costs.of(count, context)
        if not costs.pay:
            return [[] for _ in sequences]
        draftees = [self._look_up(sequence) for sequence in sequences]
        drafts = [[] if each.draft is None else each.draft.token_ids for each in draftees]
        survivals = [self._survivals(draftee) for draftee in draftees]
        looked_up = [True] * count
        if self._proposals is not None:
            for index, sequence in enumerate(sequences):
                token_ids, chances = self._proposals.drafts(sequence)
                if sum(chances) > sum(survivals[index]):
                    drafts[index], survivals[index] = token_ids, chances
                    looked_up[index] = False
        if not any(survivals):
            return [[] for _ in sequences]
        lengths = choose_lengths(survivals, costs.durations, costs.margin)
        for index, draftee in enumerate(draftees):
            draft, length = draftee.draft, lengths[index]
            drafts[index] = drafts[index][:length]
            if length:
                source = draft.source if draft is not None and looked_up[index] else None
                sequences[index].drafts_predicted = source is DraftSource.PREDICTION
            if draft is None or not looked_up[index]:
                continue
            if length:
                draftee.unused = 0
            else:
                draftee.unused += 1
                draftee.idle = min(MAX_IDLE, draftee.unused // _IDLE_AFTER)
        return drafts

    def ask(self, sequences: Many[Sequence]) -> list[int] | None:
        """See the protocol."""
        assert self._proposals is not None
        found = []
        for sequence in sequences:
            draftee = self._draftees.get(sequence.request.request_id)
            # Where a text goes on as one that was found, it probably still does after the step.
            found.append(0.0 if draftee is None else sum(self._survivals(draftee)))
        return self._proposals.ask(sequences, found)

    def proposed(self, sequence: Sequence, proposal: Proposal) -> None:
        """See the protocol."""
        if self._proposals is not None:
            self._proposals.take(sequence, proposal)

    def _look_up(self, sequence: Sequence) -> _Draftee:
        key, tokens = sequence.request.request_id, sequence.token_ids
        draftee = self._draftees.get(key)
        if draftee is None:
            draftee = self._draftees[key] = _Draftee()
        if draftee.draft is not None:
            self._settle(draftee, tokens)
        if self._proposals is not None:
            self._proposals.settle(sequence)
        if draftee.idle:
            draftee.idle -= 1
            return draftee
        most = min(self._most, sequence.max_tokens - len(tokens) - 1)
        for drafter in self._drafters:
            draft = drafter.draft(sequence, most)
            if draft is not None and sequence.matcher is not None:
                draft = _allowed(draft, sequence.matcher)
            if draft is not None:
                draftee.draft, draftee.at = draft, len(tokens)
                break
        return draftee

    def _settle(self, draftee: _Draftee, tokens: list[int]) -> None:
        """Learn from what followed the latest draft."""
        draft, draftee.draft = draftee.draft, None
        assert draft is not None
        own, learn, length = draftee.own, self._acceptance.learn, draft.length
        for index, token in enumerate(tokens[draftee.at : draftee.at + len(draft.token_ids)]):
            right = token == draft.token_ids[index]
            learn(own, class_of(draft.source, length + index), draft.shares[index], right)
            if not right:
                break

    def _survivals(self, draftee: _Draftee) -> list[float]:
        """The chances that each of its drafts and all before it are right."""
        draft = draftee.draft
        if draft is None:
            return []
        first, count = draft.length, len(draft.shares)
        kinds = [class_of(draft.source, length) for length in range(first, first + count)]
        return self._acceptance.survivals(draftee.own, kinds, draft.shares)

    def learn(self, sequence: Sequence, drafts: Many[int], accepted: int) -> None:
        """See the protocol; the tokens themselves tell more."""

    def finish(self, sequence: Sequence) -> None:
        """See the protocol."""
        self._draftees.pop(sequence.request.request_id, None)
        if self._proposals is not None:
            self._proposals.finish(sequence)
        for drafter in self._drafters:
            drafter.finish(sequence)

    def timed(self, step: Step, seconds: float) -> None:
        """See the protocol."""
        count = step.num_decodes
        if not count or count != len(step.rows) or step.new or step.num_prefill_tokens:
            return
        context, asked = sum(step.starts) // count, step.proposals
        if asked and all(asked):
            time = StepTime(count, count + step.num_drafts, context, seconds, max(asked))
            self._costs.learn_proposing(time)
        elif not any(asked):
            self._costs.learn(count, step.num_drafts, context, seconds)


def _allowed(draft: Draft, matcher: GrammarMatcher) -> Draft | None:
    """The drafts up to the first that the grammar does not allow."""
    count = matcher.num_allowed(draft.token_ids)
    if count == len(draft.token_ids):
        return draft
    token_ids, shares = draft.token_ids[:count], draft.shares[:count]
    return Draft(draft.source, draft.length, token_ids, shares) if count else None
