"""A draft model computes a prompt only where drafts save more than that takes.

The durations of steps are made up, and a text is its positions, of which the draft model knows all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.unit.engine.speculation.sequences import sequence
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.answer_lengths import AnswerLengths
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import Proposal, Step, StepTime, TokenAppend

ROW, DRAFT, LAG = 0.1, 0.2, 0.02
"""What a row, a draft, and each token that the draft model has not computed take, in steps."""

MEASURED = [
    StepTime(1, 1, 8, 1.0),
    StepTime(1, 101, 8, 1 + 100 * ROW),
    StepTime(1, 1, 8, 1 + DRAFT, 1),
    StepTime(1, 1, 8, 1 + 5 * DRAFT, 5),
    StepTime(1, 1, 256, 1 + DRAFT + 256 * LAG, 1, 256),
]


@dataclass
class Server:
    """Answers one request after the other.

    Attributes:
        slower: what catching up takes, as a multiple of what was measured.
        most_lag: tokens that the draft model computes at once.
        right: whether its drafts are.
        asked: steps in which it was asked for drafts, of the latest request; 0 is the prompt's.
        caught_up: tokens that it has computed behind, in all.
    """

    slower: float = 1.0
    most_lag: int = 1 << 30
    right: bool = True
    asked: list[int] = field(default_factory=list)
    caught_up: int = 0
    requests: int = 0
    tested: AdaptiveSpeculator = field(init=False)

    def __post_init__(self) -> None:
        costs = StepCosts(MEASURED, 7)
        self.tested = AdaptiveSpeculator(7, costs, (), most_proposed=5, most_lag=self.most_lag)

    def answer(self, prompt: int, length: int, reused: int = 0) -> float:
        """Answer a request; returns the seconds of its decodes, of a plain one 1."""
        self.requests += 1
        request = sequence(range(prompt), request_id=self.requests, new=10_000)
        request.reused_tokens = computed = reused
        tokens = request.token_ids
        self.asked.clear()
        seconds, steps = 0.0, 0
        while len(tokens) < prompt + length:
            drafts = self.tested.propose([request], False)[0] if steps else []
            (wanted,) = self.tested.ask([request]) or [0]
            lag = min(len(tokens) + 1 - computed, self.most_lag) if wanted else 0
            took = 1 + ROW * len(drafts) + DRAFT * wanted
            if lag > 32:
                took += lag * LAG * self.slower
                self.caught_up += lag
            computed += lag
            step = _step(tokens, drafts, wanted, not steps)
            kept = drafts == list(range(len(tokens), len(tokens) + len(drafts)))
            accepted = len(drafts) if kept else 0
            tokens.extend(range(len(tokens), len(tokens) + accepted + 1))
            if drafts:
                self.tested.learn(request, drafts, accepted)
            if wanted:
                self.asked.append(steps)
                if computed >= len(tokens) - accepted:
                    self._propose(request, wanted)
            self.tested.timed(step, took)
            seconds += took if steps else took - 1  # the prompt's step is not a decode
            steps += 1
        self.tested.finish(request)
        return seconds

    def _propose(self, request: Sequence, wanted: int) -> None:
        known = len(request.token_ids)
        drafts = list(range(known, known + wanted)) if self.right else [0] * wanted
        self.tested.proposed(request, Proposal(drafts, [0.9] * wanted))


def _step(tokens: list[int], drafts: list[int], wanted: int, is_prompt: bool) -> Step:
    count = len(tokens) if is_prompt else 1 + len(drafts)
    step = Step(0, num_decodes=0 if is_prompt else 1, rows=[0], counts=[count])
    step.starts, step.samples = [len(tokens) - 1], [1 + len(drafts)]
    step.proposals = [wanted]
    if drafts:
        step.drafts.append(TokenAppend(0, len(tokens), drafts))
    return step


def test_short_answers_to_long_prompts_are_as_fast_as_without_drafts() -> None:
    server = Server()
    for _ in range(30):
        assert server.answer(2000, 8) <= 8
    assert not server.caught_up


def test_long_answers_to_long_prompts_are_worth_it() -> None:
    server = Server()
    server.answer(1000, 400)
    taken = [server.answer(1000, 400) for _ in range(10)]
    assert max(taken) < 400 * 0.6
    assert server.caught_up == pytest.approx(11_000, rel=0.2)


def test_the_first_token_does_not_wait_for_the_draft_model() -> None:
    server = Server()
    for _ in range(5):
        server.answer(1000, 400)
    assert server.asked[0] == 1
    server.answer(20, 50)
    assert server.asked[0] == 0, "a short prompt takes no time"


def test_an_answer_that_is_longer_than_others_is_caught_up_with() -> None:
    server = Server()
    for _ in range(30):
        server.answer(1000, 8)
    assert server.answer(1000, 600) < 600 * 0.75
    assert server.caught_up


def test_a_prefix_that_is_used_again_need_not_be_computed() -> None:
    server = Server()
    for _ in range(30):
        server.answer(1000, 8)
    assert server.answer(1020, 50, reused=1000) < 50 * 0.6
    assert server.asked[0] == 0


def test_catching_up_that_takes_longer_than_was_measured_is_given_up() -> None:
    """Of 120 tokens, drafts save about 60 steps: more than the 20 measured, less than 100."""
    server = Server(slower=5.0)
    for _ in range(10):
        server.answer(1000, 120)
    server.caught_up = 0
    for _ in range(10):
        assert server.answer(1000, 120) <= 120
    assert not server.caught_up


def test_catching_up_that_takes_less_than_was_measured_is_learnt() -> None:
    server = Server(slower=0.25)
    server.answer(1000, 400)
    for _ in range(10):
        server.answer(1000, 60)
    assert server.answer(1000, 60) < 60 * 0.75


def test_what_takes_several_steps_is_no_loss() -> None:
    server = Server(most_lag=300)
    for _ in range(10):
        server.answer(1000, 400)
    assert server.answer(1000, 400) < 400 * 0.6
    assert server.asked == list(range(1, 1 + len(server.asked))), "in every step behind the first"


def test_a_draft_model_that_is_never_right_reads_few_prompts() -> None:
    server = Server(right=False)
    taken = sum(server.answer(1000, 400) for _ in range(60))
    assert taken < 60 * 400 * 1.03
    server.right = True
    for _ in range(60):
        server.answer(1000, 400)
    assert server.answer(1000, 400) < 400 * 0.6, "and is found out once it is right"


# --------------------------------------------------------------------------- what is left of one


def test_without_others_an_answer_goes_on_for_half_of_what_it_has() -> None:
    lengths = AnswerLengths()
    assert lengths.left(sequence([1] * 9)) == 0
    assert lengths.left(sequence([1] * 9, [2] * 40)) == 20


def test_answers_are_as_long_as_others() -> None:
    lengths = AnswerLengths()
    lengths.learn(sequence([1], [2] * 100))
    lengths.learn(sequence([1], [2] * 200))
    lengths.learn(sequence([1]))  # without an answer: cancelled while it waited
    assert lengths.left(sequence([1], [2] * 30)) == 120
    assert lengths.left(sequence([1], [2] * 300)) == 150
    assert lengths.left(sequence([1], [2] * 30, new=40)) == 10
    for _ in range(200):
        lengths.learn(sequence([1], [2] * 10))
    assert lengths.left(sequence([1])) == pytest.approx(10, abs=0.1)
