"""The speculator verifies what pays, and learns from what follows."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest

from tests.unit.engine.fake_grammar import FakeMatcher, slots
from tests.unit.engine.speculation.sequences import sequence
from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.drafter import Draft
from tgi_cli.engine.speculation.look_ups import MAX_PAUSE
from tgi_cli.engine.speculation.lookup import LookupDrafter
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import NewRow, Proposal, Step, StepTime, TokenAppend
from tgi_cli.sampling.params import SamplingParams

FREE = [StepTime(1, 1, 8, 1.0), StepTime(1, 100, 8, 1.01)]
STEEP = [StepTime(1, 1, 8, 1.0), StepTime(1, 2, 8, 1.5), StepTime(1, 100, 8, 50.0)]
CHEAP = [StepTime(1, 1, 8, 1.0), StepTime(1, 101, 8, 21.0)]
DEAR = [StepTime(1, 1, 8, 1.0), StepTime(1, 100, 8, 300.0)]
SHORT = [time._replace(seconds=time.seconds / 1000) for time in STEEP]
"""Steps of a millisecond, beside which a look-up takes a while."""

SECONDS = 2e-5
"""Of a look-up."""


class Script:
    """Drafts whatever it is told to; counts how often it is asked."""

    def __init__(self, token_ids: Many[int], length: int = 20) -> None:
        self.token_ids = list(token_ids)
        self.length = length
        self.asked: list[int] = []
        self.finished: list[int] = []
        self.now = 0.0

    def draft(self, asked: Sequence, most: int) -> Draft | None:
        self.asked.append(most)
        self.now += SECONDS
        if not self.token_ids:
            return None
        tokens = self.token_ids[:most]
        return Draft(DraftSource.CONTEXT, self.length, tokens, [1.0] * len(tokens))

    def finish(self, ended: Sequence) -> None:
        self.finished.append(ended.request.request_id)


def speculator(drafter: Script, times: list[StepTime], most: int = 7) -> AdaptiveSpeculator:
    costs = StepCosts(times, most)
    return AdaptiveSpeculator(most, costs, [drafter], lambda: drafter.now)


def propose(tested: AdaptiveSpeculator, *sequences: Sequence, others: int = 0) -> list[list[int]]:
    """The drafts for a step, which is applied without a duration to learn from."""
    found = tested.propose(sequences, False, others)
    tested.timed(step(new=True), 1.0)
    return found


def test_rows_that_cost_nothing_are_all_used() -> None:
    drafter = Script([5, 6, 7, 8, 9, 10, 11, 12])
    asked = sequence([1, 2, 3])
    assert speculator(drafter, FREE).propose([asked], False) == [[5, 6, 7, 8, 9, 10, 11]]
    assert speculator(drafter, FREE, most=3).propose([asked], False) == [[5, 6, 7]]


def test_no_more_is_drafted_than_may_follow() -> None:
    drafter = Script(range(10))
    asked = sequence([1, 2, 3], [4, 5], new=6)
    assert speculator(drafter, FREE).propose([asked], False) == [[0, 1, 2]]
    assert drafter.asked == [3]


def test_where_no_draft_can_pay_nothing_is_looked_up() -> None:
    drafter = Script([5, 6])
    assert speculator(drafter, DEAR).propose([sequence([1])] * 3, False) == [[], [], []]
    assert not drafter.asked


def test_each_sequence_gets_the_drafts_that_it_deserves() -> None:
    """The one whose drafts were right has more of them verified than the other."""
    drafter = Script([5, 6, 7])
    good, bad = sequence([1], request_id=1), sequence([2], request_id=2)
    tested = speculator(drafter, CHEAP)
    for _ in range(30):
        proposals = propose(tested, good, bad)
        good.token_ids += [5, 6, 7, 1]
        bad.token_ids += [9]
    assert len(proposals[0]) > len(proposals[1])


def test_drafts_that_are_never_right_are_given_up_without_being_verified_again() -> None:
    drafter = Script([5])
    asked, tested = sequence([1]), speculator(drafter, SHORT)
    verified = 0
    for _ in range(100):
        verified += len(propose(tested, asked)[0])
        asked.token_ids.append(9)
    assert 1 <= verified <= 10
    assert len(drafter.asked) < 40, "it is looked up less and less"
    assert len(drafter.asked) >= 100 // (MAX_PAUSE + 1)


def test_look_ups_beside_long_steps_never_pause() -> None:
    drafter = Script([5])
    asked, tested = sequence([1]), speculator(drafter, STEEP)
    for _ in range(100):
        propose(tested, asked)
        asked.token_ids.append(9)
    assert len(drafter.asked) == 100


def test_where_nothing_is_found_look_ups_pause_as_well() -> None:
    drafter = Script([])
    asked, tested = sequence([1]), speculator(drafter, SHORT)
    for _ in range(100):
        assert propose(tested, asked) == [[]]
        asked.token_ids.append(9)
    assert 100 // (MAX_PAUSE + 1) <= len(drafter.asked) < 40


def test_a_request_begins_with_the_pauses_that_others_ended_with() -> None:
    """Short answers would otherwise spend all of their time on finding out."""
    drafter = Script([])
    tested = speculator(drafter, SHORT)
    asked_of = []
    for number in range(12):
        asked = sequence([1], request_id=number)
        drafter.asked.clear()
        for _ in range(20):
            propose(tested, asked)
            asked.token_ids.append(9)
        asked_of.append(len(drafter.asked))
        tested.finish(asked)
    assert asked_of[-1] < asked_of[0]
    assert asked_of[-1] >= 1, "each is looked up at its beginning"


def test_drafts_that_are_right_never_pause() -> None:
    drafter = Script([5, 6, 7])
    free = [time._replace(seconds=time.seconds / 1000) for time in FREE]
    asked, tested = sequence([1]), speculator(drafter, free)
    for _ in range(40):
        assert propose(tested, asked) == [[5, 6, 7]]
        asked.token_ids += [5, 6, 7, 1]


def test_drafts_that_become_right_are_verified_again() -> None:
    """Nothing is verified meanwhile: what follows tells that they would have been right."""
    drafter = Script([5])
    asked, tested = sequence([1]), speculator(drafter, STEEP)
    for _ in range(100):
        propose(tested, asked)
        asked.token_ids.append(9)
    assert tested.propose([asked], False) == [[]]
    for _ in range(300):
        asked.token_ids.append(5)
        verified = propose(tested, asked)
    assert verified == [[5]]


def test_a_draft_that_the_grammar_forbids_is_cut() -> None:
    drafter = Script([11, 99, 13])
    asked = sequence([1], grammar="x")
    asked.matcher = FakeMatcher(slots([11, 12], [12, 13], [13]))
    assert speculator(drafter, FREE).propose([asked], False) == [[11]]
    asked.matcher = FakeMatcher(slots([12], [12]))
    assert speculator(drafter, FREE).propose([asked], False) == [[]]


def test_whether_drafts_are_of_the_prediction_is_told() -> None:
    tested = AdaptiveSpeculator(7, StepCosts(FREE, 7), [LookupDrafter()])
    first = sequence([1, 2], prediction=(5, 6, 7), request_id=1)
    second = sequence([1, 2, 3, 1, 2], request_id=2)
    assert tested.propose([first, second], False) == [[5, 6, 7], [3, 1, 2, 3, 1, 2, 3]]
    assert (first.draft_source, second.draft_source) == ("prediction", "context")


def test_the_first_drafter_that_has_something_is_asked_alone() -> None:
    nothing, one, two = Script([]), Script([5]), Script([6])
    tested = AdaptiveSpeculator(7, StepCosts(FREE, 7), [nothing, one, two])
    assert tested.propose([sequence([1])], False) == [[5]]
    assert (nothing.asked, one.asked, two.asked) == ([7], [7], [])


def test_an_ended_request_leaves_nothing_behind() -> None:
    drafter = Script([5])
    tested = speculator(drafter, STEEP)
    asked = sequence([1], request_id=4)
    for _ in range(40):
        propose(tested, asked)
        asked.token_ids.append(9)
    assert tested.propose([asked], False) == [[]]
    tested.finish(asked)
    tested.finish(sequence([1], request_id=5))  # never ran
    assert drafter.finished == [4, 5]
    drafter.asked.clear()
    tested.propose([sequence([1], request_id=4)], False)
    assert drafter.asked == [7], "another request of the same id does not pause"


def step(*, drafts: int = 0, prefill: int = 0, new: bool = False) -> Step:
    made = Step(0, num_decodes=1, rows=[0], starts=[10], counts=[1 + drafts], samples=[1 + drafts])
    if drafts:
        made.drafts.append(TokenAppend(0, 11, [5] * drafts))
    if prefill:
        made.rows.append(1)
        made.starts.append(0)
        made.counts.append(prefill)
        made.samples.append(0)
    if new:
        made.new.append(NewRow(0, 0, [1], 1, [0], SamplingParams()))
    return made


def test_measured_steps_change_what_is_worth_it() -> None:
    drafter = Script([5])
    tested = speculator(drafter, FREE)
    assert tested.propose([sequence([1])], False) == [[5]]
    for _ in range(64):
        tested.timed(step(), 1.0)
        tested.learn(sequence([1]), [5], 2)  # as much as is lost, so that nothing pauses
        tested.timed(step(drafts=1), 3.0)
    assert tested.propose([sequence([1])], False) == [[]]
    assert drafter.asked == [7, 7]


def test_beside_prompts_rows_cost_what_those_of_a_large_step_do() -> None:
    """The first row is nearly free, and each one of many takes as long as half a step."""
    bound = [StepTime(1, 1, 8, 1.0), StepTime(1, 4, 8, 1.01), StepTime(1, 32, 8, 15.0)]
    likely = Script([5, 6, 7], length=3)
    tested = speculator(likely, bound)
    assert tested.propose([sequence([1])], False) == [[5, 6, 7]]
    assert tested.propose([sequence([1], request_id=1)], True) == [[]]


def test_the_time_of_looking_up_is_no_part_of_what_steps_take() -> None:
    """It would make steps without look-ups seem to gain."""
    drafter = Script([])
    costs = StepCosts(SHORT, 7)
    tested = AdaptiveSpeculator(7, costs, [drafter], lambda: drafter.now)
    for number in range(60):
        began = drafter.now
        tested.propose([sequence([1], request_id=number)], False)
        tested.timed(step(), 0.001 + drafter.now - began)
    assert costs.speed(1) == pytest.approx(1.0)


def test_drafts_that_are_right_but_too_rarely_for_the_load_let_look_ups_pause() -> None:
    """Beside seven others, a row has to be right in two of three cases."""
    times = [StepTime(1, 1, 8, 1e-3), StepTime(1, 33, 8, 3e-3), StepTime(8, 8, 8, 1.5e-3)]
    drafter = Script([5], length=1)
    tested = speculator(drafter, times)
    sequences = [sequence([1], request_id=number) for number in range(8)]
    for number in range(200):
        propose(tested, *sequences)
        for each in sequences:
            each.token_ids.append(5 if number % 3 == 0 else 9)
    assert len(drafter.asked) < 200 * 8 / 8


def pauses(tested: AdaptiveSpeculator, drafter: Script) -> int:
    """Steps of one sequence until something is looked up again."""
    asked, steps = len(drafter.asked), 0
    while len(drafter.asked) == asked:
        propose(tested, sequence([1], request_id=100 + steps))
        steps += 1
    return steps - 1


def test_steps_that_lose_time_pause_look_ups_for_longer_each_time() -> None:
    drafter = Script([5])
    tested = speculator(drafter, FREE)
    found = []
    for _ in range(6):
        while tested.may_propose([sequence([1])]):
            tested.timed(step(drafts=1), 1.5)  # loses half a step
        found.append(pauses(tested, drafter))
    assert found == [64, 128, 256, 512, 512, 512]


def test_steps_that_gain_time_never_pause_look_ups_however_long_some_take() -> None:
    drafter = Script([5])
    tested = speculator(drafter, FREE)
    for number in range(400):
        tested.learn(sequence([1]), [5], 1)
        tested.timed(step(drafts=1), 9.0 if number % 8 == 0 else 1.4)
        assert not pauses(tested, drafter)


def test_between_look_ups_nothing_may_be_proposed() -> None:
    """So that the engine need not wait for the tokens of the step in flight."""
    drafter = Script([])
    tested = speculator(drafter, SHORT)
    asked, other = sequence([1]), sequence([1], request_id=1)
    for _ in range(99):
        may, before = tested.may_propose([asked]), len(drafter.asked)
        propose(tested, asked)
        assert may == (len(drafter.asked) > before)
    while tested.may_propose([asked]):
        propose(tested, asked)
    assert tested.may_propose([other]), "it has not been looked up"
    assert tested.may_propose([asked], others=1), "the load has changed"
    tested.finish(other)
    assert tested.may_propose([asked]), "another sequence may have taken its place"


def test_what_follows_a_draft_is_learned_before_the_next_step_is_scheduled() -> None:
    asked, tested = sequence([1]), speculator(Script([5]), SHORT)
    propose(tested, asked)
    assert tested.may_propose([asked])


def test_where_no_draft_can_pay_nothing_is_proposed_for_some_steps() -> None:
    asked, tested = sequence([1]), speculator(Script([5]), DEAR)
    propose(tested, asked)
    steps = 1
    while not tested.may_propose([asked]):
        propose(tested, asked)
        steps += 1
    assert steps == 16


def test_rows_that_seem_a_little_too_dear_are_tried_within_a_share_of_the_time() -> None:
    unsure = [StepTime(1, 1, 8, 1.0), StepTime(1, 100, 8, 100.0)]  # a step for each row
    tested = speculator(Script([5], length=20), unsure)
    tried = [len(propose(tested, sequence([1]))[0]) for _ in range(400)]
    assert tried[0] == 1
    assert 2 <= sum(tried) <= 30
    beside_prompts = speculator(Script([5], length=20), unsure)
    assert beside_prompts.propose([sequence([1])], True) == [[]], "they teach nothing"


def test_after_steps_that_lose_time_nothing_may_be_proposed_for_the_pause() -> None:
    tested = speculator(Script([5]), FREE)
    while tested.may_propose([sequence([1])]):
        tested.timed(step(drafts=1), 1.5)
    assert not tested.may_propose([sequence([1])])
    assert tested.may_propose([sequence([1])], others=1), "each load by itself"
    for _ in range(64):
        tested.timed(step(), 1.0)
    assert tested.may_propose([sequence([1])])


def test_drafts_slow_down_the_sequences_without_them_as_well() -> None:
    """Alone, a row that costs half a step is worth it; beside seven others it is not."""
    half = [StepTime(1, 1, 8, 1.0), StepTime(1, 100, 8, 50.5)]
    likely = Script([5], length=20)
    assert speculator(likely, half).propose([sequence([1])], False) == [[5]]
    assert speculator(likely, half).propose([sequence([1])], False, others=7) == [[]]


def test_a_loss_pauses_look_ups_in_steps_that_decode_as_many_sequences() -> None:
    """Also if most of them cannot have drafts."""
    tested = speculator(Script([5]), FREE)
    many = Step(0, num_decodes=8, rows=list(range(8)), starts=[10] * 8, counts=[1] * 7 + [2])
    many.drafts.append(TokenAppend(0, 11, [5]))
    for _ in range(10):
        tested.timed(many, 4.0)
    assert tested.propose([sequence([1])], False, others=7) == [[]]
    assert tested.propose([sequence([1])], False) == [[5]]


def test_look_ups_of_many_sequences_that_fail_take_a_bounded_share_of_the_time() -> None:
    """A look-up takes a fiftieth of a step, and every sequence gets its turn."""
    drafter = Script([])
    times = [StepTime(1, 1, 8, 9e-4), StepTime(1, 100, 8, 9e-4), StepTime(32, 32, 8, 1e-3)]
    tested = speculator(drafter, times)
    sequences = [sequence([1], request_id=number) for number in range(32)]
    steps = 6400
    for _ in range(steps):
        propose(tested, *sequences)
    assert 0.004 * steps < len(drafter.asked) * SECONDS / 1e-3 < 0.006 * steps


@pytest.mark.parametrize("of", [{"prefill": 5}, {"new": True}])
def test_steps_that_do_more_than_decode_are_no_measure(of: dict[str, int]) -> None:
    tested = speculator(Script([5]), FREE)
    for _ in range(64):
        tested.timed(step(), 1.0)
        tested.timed(step(drafts=1, **of), 3.0)  # type: ignore[arg-type]
    assert tested.propose([sequence([1])], False) == [[5]]


def proposing(times: list[StepTime], most: int = 5, *drafters: Script) -> AdaptiveSpeculator:
    return AdaptiveSpeculator(7, StepCosts(times, 7), drafters, most_proposed=most)


def test_proposals_that_cost_nothing_are_asked_for_and_verified() -> None:
    tested, asked = proposing(FREE), sequence([1, 2])
    assert tested.asks_worker
    assert tested.ask([asked]) == [5]
    tested.proposed(asked, Proposal([5, 6, 7, 8, 9], [0.95] * 5))
    assert tested.propose([asked], False) == [[5, 6, 7, 8, 9]]
    asked.token_ids.append(5)
    assert tested.propose([asked], False) == [[]], "they follow another token"


def test_without_a_drafter_that_has_weights_the_worker_is_not_asked() -> None:
    assert not speculator(Script([5]), FREE).asks_worker


def test_no_more_is_asked_for_than_may_follow() -> None:
    tested = proposing(FREE)
    assert tested.ask([sequence([1], [2, 3], new=6)]) == [3]
    assert tested.ask([sequence([1], [2, 3], new=3)]) == [0]


def test_drafts_of_which_the_drafter_is_not_sure_are_not_verified_where_rows_cost() -> None:
    tested, asked = proposing(CHEAP), sequence([1, 2])
    tested.proposed(asked, Proposal([5, 6, 7], [0.95, 0.95, 0.01]))
    assert tested.propose([asked], False) == [[5, 6]]


def test_where_proposals_take_longer_than_they_save_the_worker_need_not_follow() -> None:
    dear = [*FREE, StepTime(1, 1, 8, 8.0, 1), StepTime(1, 1, 8, 40.0, 5)]
    assert proposing(dear).ask([sequence([1])]) is None
    assert proposing(FREE).ask([]) == [], "prompts are followed where drafts may pay"


def test_the_drafts_that_promise_more_are_verified() -> None:
    long, short = Script([5] * 7, length=40), Script([6], length=1)
    for drafter, expected in ((long, [5] * 7), (short, [7, 8, 9])):
        tested, asked = proposing(FREE, 5, drafter), sequence([1, 2])
        tested.proposed(asked, Proposal([7, 8, 9], [0.95] * 3))
        assert tested.propose([asked], False) == [expected]


def test_behind_a_long_match_nothing_is_asked_for() -> None:
    tested, asked = proposing(FREE, 5, Script([5] * 7, length=40)), sequence([1, 2])
    tested.propose([asked], False)
    assert tested.ask([asked]) == [0]


def test_a_proposal_is_cut_where_the_grammar_forbids_it() -> None:
    tested, asked = proposing(FREE), sequence([1], grammar="x")
    asked.matcher = FakeMatcher(slots([11, 12], [12, 13], [13]))
    tested.proposed(asked, Proposal([11, 99, 13], [0.95] * 3))
    assert tested.propose([asked], False) == [[11]]


def test_where_nothing_was_proposed_the_engine_may_schedule_ahead() -> None:
    short = [time._replace(seconds=time.seconds / 1000) for time in FREE]
    times = [*short, StepTime(1, 1, 8, 1.01e-3, 1), StepTime(1, 1, 8, 1.05e-3, 5)]
    drafter = Script([])
    costs = StepCosts(times, 7)
    tested = AdaptiveSpeculator(7, costs, [drafter], lambda: drafter.now, most_proposed=5)
    asked, slow = sequence([1]), step()
    slow.proposals = [5]
    assert tested.ask([asked]) == [5]
    for _ in range(8):
        propose(tested, asked)
        assert tested.may_propose([asked]), "after what the worker proposes"
        tested.proposed(asked, Proposal([5], [0.9]))
        tested.timed(slow, 5e-3)
    assert tested.ask([asked]) is None
    propose(tested, asked)
    assert not tested.may_propose([asked])


def test_measured_proposals_change_what_is_asked_for() -> None:
    times = [*FREE, StepTime(1, 1, 8, 1.01, 1), StepTime(1, 1, 8, 1.05, 5)]
    tested = proposing(times)
    pair = [sequence([1], request_id=1), sequence([2], request_id=2)]
    assert tested.ask(pair) == [5, 5]
    slow = step()
    slow.proposals = [5]
    for _ in range(64):
        tested.timed(step(), 1.0)
        tested.proposed(sequence([1]), Proposal([5], [0.9]))
        tested.timed(slow, 21.0)
    assert tested.ask(pair) is None, "their own steps have lost nothing"


def test_what_a_drafter_has_not_proposed_is_no_measure_but_a_loss() -> None:
    """It cannot propose behind what it has missed, or has no token for what follows."""
    times = [*FREE, StepTime(1, 1, 8, 1.01, 1), StepTime(1, 1, 8, 1.05, 5)]
    tested = proposing(times)
    slow = step()
    slow.proposals = [5]
    for _ in range(64):
        tested.timed(slow, 21.0)
    assert tested.ask([sequence([1])]) is None
    assert tested.ask([sequence([1], request_id=1), sequence([2], request_id=2)]) == [5, 5]
