"""Drafts with weights are proposed where that makes answers faster, whatever was measured before.

The durations of steps are made up here, and so is what follows: a text of which each token is its
position. A drafter that is right drafts the next positions, and one that is wrong drafts 0.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from tests.unit.engine.speculation.sequences import sequence
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.balance import CREDIT, FIRST_PAUSE, MAX_PAUSE, Balance
from tgi_cli.engine.speculation.proposals import RECENT
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import Proposal, Step, StepTime, TokenAppend

PLAIN = StepTime(1, 1, 8, 1.0)
ROWS = [PLAIN, StepTime(1, 101, 8, 11.0)]
"""A row takes a tenth of a step."""

MEASURED = [*ROWS, StepTime(1, 1, 8, 1.2, 1), StepTime(1, 1, 8, 2.0, 5)]
"""And a draft two tenths."""


@dataclass
class Server:
    """Answers one request, step by step.

    Attributes:
        times: as measured at warm-up.
        most: drafts at once.
        slower: what all steps take, as a multiple of that.
        draft_seconds: of each draft.
        follow_seconds: of a step that is followed, whether drafts are wanted or not.
        asked: what the worker was asked for in each step; None where it need not follow.
        seconds: in all.
    """

    times: list[StepTime]
    most: int = 5
    slower: float = 1.0
    draft_seconds: float = 0.2
    follow_seconds: float = 0.0
    asked: list[int | None] = field(default_factory=list)
    seconds: float = 0.0
    tested: AdaptiveSpeculator = field(init=False)
    request: Sequence = field(init=False)

    def __post_init__(self) -> None:
        costs = StepCosts(self.times, 7)
        self.tested = AdaptiveSpeculator(7, costs, (), most_proposed=self.most)
        self.request = sequence([0, 1, 2], new=1 << 20)

    def run(self, steps: int, right: bool) -> float:
        """Compute steps; returns the seconds of a token, of plain steps 1."""
        began, before = self.seconds, len(self.request.token_ids)
        for _ in range(steps):
            self._step(right)
        tokens = len(self.request.token_ids) - before
        return (self.seconds - began) / self.slower / tokens

    def _step(self, right: bool) -> None:
        tested, request = self.tested, self.request
        tokens = request.token_ids
        (drafts,) = tested.propose([request], False)
        counts = tested.ask([request])
        self.asked.append(None if counts is None else counts[0])
        wanted = 0 if counts is None else counts[0]
        rows = 1 + len(drafts)
        made = Step(
            0, num_decodes=1, rows=[0], starts=[len(tokens) - 1], counts=[rows], samples=[rows]
        )
        if drafts:
            made.drafts.append(TokenAppend(0, len(tokens), drafts))
        made.proposals = counts or []
        seconds = 1 + 0.1 * len(drafts) + self.draft_seconds * wanted
        seconds = (seconds + self.follow_seconds * (counts is not None)) * self.slower
        expected = list(range(len(tokens), len(tokens) + len(drafts)))
        accepted = len(drafts) if drafts == expected else 0
        tokens.extend(range(len(tokens), len(tokens) + accepted + 1))
        if drafts:
            tested.learn(request, drafts, accepted)
        if wanted:
            known = len(tokens)
            proposed = list(range(known, known + wanted)) if right else [0] * wanted
            tested.proposed(request, Proposal(proposed, [0.9] * wanted))
        tested.timed(made, seconds)
        self.seconds += seconds


def test_a_drafter_that_is_right_is_asked_in_every_step() -> None:
    server = Server(MEASURED)
    assert server.run(500, right=True) < 0.5
    assert all(server.asked)


def test_a_drafter_that_is_never_right_costs_next_to_nothing() -> None:
    server = Server(MEASURED)
    assert server.run(400, right=False) < 1.06
    server.run(4600, right=False)
    assert server.seconds < 5000 * 1.01
    assert sum(1 for asked in server.asked[-2000:] if asked is not None) < 100


def test_it_is_asked_again_once_it_is_right() -> None:
    server = Server(MEASURED)
    server.run(3000, right=False)
    server.run(MAX_PAUSE // 2, right=True)
    assert server.run(200, right=True) < 0.5


def test_proposals_that_take_longer_than_was_measured_are_given_up() -> None:
    """Though every draft is right: three cost more than the three steps that they save."""
    server = Server(MEASURED, draft_seconds=1.2)
    server.run(5000, right=True)
    assert server.run(1000, right=True) < 1.02


def test_following_steps_is_given_up_where_drafts_do_not_pay() -> None:
    server = Server(MEASURED, follow_seconds=0.3)
    server.run(5000, right=False)
    assert server.run(1000, right=False) < 1.01


def test_a_slower_machine_does_not_end_what_pays() -> None:
    """While all steps propose, nobody sees what plain ones take: a pause tells."""
    server = Server([*ROWS, StepTime(1, 1, 8, 1.6, 1)], most=1, draft_seconds=0.6)
    assert server.run(300, right=True) < 0.9
    server.slower = 1.5
    server.run(1500, right=True)
    assert server.run(300, right=True) < 0.9


def test_the_log_says_once_that_drafts_do_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        server = Server(MEASURED)
        server.run(100, right=True)
        assert not caplog.records
        server.run(6000, right=False)
    (record,) = caplog.records
    assert "drafts with weights take longer than they save with 1 requests" in record.getMessage()


def test_a_step_behind_much_that_was_not_followed_is_no_loss() -> None:
    """A drafter that catches up after a pause is not judged by that."""
    server = Server(MEASURED)
    tested, request = server.tested, server.request
    server.run(50, right=True)
    request.token_ids += range(len(request.token_ids), len(request.token_ids) + 200)
    assert tested.ask([request]) is not None
    tested.proposed(request, Proposal([1], [0.9]))
    late = Step(0, num_decodes=1, rows=[0], starts=[9], counts=[1], samples=[1], proposals=[5])
    for _ in range(3):
        tested.timed(late, 1000.0)
        request.token_ids += range(len(request.token_ids), len(request.token_ids) + 200)
        assert tested.ask([request]) is not None
        tested.proposed(request, Proposal([1], [0.9]))


def test_other_numbers_of_requests_have_a_balance_of_their_own() -> None:
    server = Server(MEASURED)
    server.run(2000, right=False)
    while server.asked[-1] is not None:
        server.run(1, right=False)
    pair = [sequence([1], request_id=1), sequence([2], request_id=2)]
    assert server.tested.ask(pair) is not None
    assert server.tested.ask([server.request]) is None


def test_a_drafter_that_has_paid_of_late_follows_where_it_cannot() -> None:
    """Many requests become few again, and heads cannot draft for what they have missed."""
    server = Server(MEASURED)
    many = [sequence([1], request_id=9 + number) for number in range(60)]
    assert server.tested.ask(many) is None
    server.run(100, right=True)
    for _ in range(RECENT):
        assert server.tested.ask(many) == [0] * 60
    assert server.tested.ask(many) is None


# --------------------------------------------------------------------------- the balance alone


def test_each_trial_that_loses_doubles_the_pause() -> None:
    balance, pauses = Balance(), []
    for _ in range(10):
        while not balance.add(-0.5):
            assert not balance.pause
        pauses.append(balance.pause)
        balance.pause = 0
    assert pauses == [min(FIRST_PAUSE << i, MAX_PAUSE) for i in range(10)]


def test_gains_make_up_for_losses() -> None:
    balance = Balance()
    assert not any(balance.add(-0.5) or balance.add(0.5) for _ in range(1000))


def test_what_was_gained_long_ago_is_lost_soon() -> None:
    balance = Balance()
    for _ in range(1000):
        balance.add(1.0)
    lost = next(count for count in range(1, 1000) if balance.add(-1.0))
    assert lost == 2 * CREDIT


def test_a_trial_that_gains_its_credit_ends_a_row_of_losses() -> None:
    balance = Balance()
    for _ in range(3):
        while not balance.add(-1.0):
            pass
    while balance.losses:
        balance.add(1.0)
    while not balance.add(-1.0):
        pass
    assert balance.pause == FIRST_PAUSE


def test_one_long_step_is_not_the_end() -> None:
    assert not Balance().add(-1000.0)
