"""A draft model's keys and values are those of each row's tokens, whatever becomes of the rows.

The draft model is the target, which reads all earlier tokens through the blocks: it is right
whenever its cache is, so each proposal is compared with what will follow.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.test_scheduler import limits, request
from tests.unit.worker.fakes import CPU, VOCAB, FakeAttention, FakeModel, make_runner, next_token
from tgi_cli.attention import KVSpec
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import Proposal, Step, StepTime
from tgi_cli.models.speculators.cache import CacheShape, DraftCache
from tgi_cli.worker.speculation.draft_model import DraftLimits, DraftModel, DraftWeights
from tgi_cli.worker.speculation.stage import ProposalStage

FREE = [StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.001)]
BLOCK, MOST, ROWS = 4, 48, 5


class GrowingAttention(FakeAttention):
    """Makes its cache when it is told to."""

    def __init__(self) -> None:
        super().__init__(0, BLOCK)
        self.block_bytes = 8

    def allocate(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)


class CountingModel(FakeModel):
    """Remembers how many tokens each pass has."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[int] = []

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        self.passes.append(len(input_ids))
        return super().forward(input_ids, positions, attention)


class Checked(AdaptiveSpeculator):
    """Compares each proposal with what follows; asks for none in some steps."""

    def __init__(self, most: int, random: Random, asks: float) -> None:
        super().__init__(7, StepCosts(FREE, 7), (), most_proposed=most)
        self._random = random
        self._asks = asks
        self.right = self.short = 0

    def ask(self, sequences: Many[Sequence]) -> list[int] | None:
        counts = super().ask(sequences)
        return counts if self._random.random() < self._asks else None

    def proposed(self, sequence: Sequence, proposal: Proposal) -> None:
        tokens = list(sequence.token_ids)
        for token in proposal.token_ids:
            assert token == next_token(tokens), "the draft model has read other tokens"
            tokens.append(token)
        self.right += len(proposal.token_ids)
        super().proposed(sequence, proposal)


class Harness:
    """A scheduler, a worker and its draft model."""

    def __init__(self, seed: int, **said: Any) -> None:
        self.random = random = Random(seed)
        num_blocks = said.pop("num_blocks", 60)
        most, asks = said.pop("most", 5), said.pop("asks", 1.0)
        step_tokens = said.pop("step_tokens", 1000)
        max_tokens = said.pop("draft_tokens", MOST)
        device = said.pop("like_a_device", False)
        self.runner, _, _ = make_runner(
            max_rows=ROWS,
            max_tokens=MOST,
            num_blocks=num_blocks,
            block_size=BLOCK,
            like_a_device=device,
        )
        shape = CacheShape(block_size=BLOCK, num_drafts=most, max_positions=MOST)
        cache = DraftCache([KVSpec(1, 16)], shape, torch.float32, CPU, "torch")
        cache.attention = GrowingAttention()  # type: ignore[assignment]
        self.model = CountingModel()
        self.draft = DraftModel(
            DraftWeights(self.model, None, cache, 0),
            self.runner.rows,
            DraftLimits(
                max_tokens=max_tokens,
                step_tokens=step_tokens,
                vocab_size=VOCAB,
                own_vocab_size=VOCAB,
                logits_at_once=3,
                scores_at_once=2,
            ),
        )
        self.draft.allocate(num_blocks, ROWS)
        self.runner.propose_with(ProposalStage(self.draft, self.runner.rows))
        self.speculator = Checked(most, random, asks)
        bounds = limits(
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_total_tokens=MOST,
            max_batch_size=ROWS,
            **{"max_batch_prefill_tokens": 16} | said,
        )
        self.scheduler = Scheduler(bounds, None, None, self.speculator)
        self.prompts: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.steps: list[Step] = []

    def add(self, prompt: list[int], new: int, **more: Any) -> int:
        key = len(self.prompts)
        self.prompts[key], self.answers[key] = prompt, []
        assert self.scheduler.add(request(key, prompt, new, **more)) is None
        return key

    def step(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.steps.append(step)
        result = self.runner.sample(self.runner.launch(step)).wait()
        outputs = self.scheduler.update(result)
        for key, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            self.answers[key].append(token)
        return True

    def finish(self) -> None:
        while self.scheduler.batch.live:
            assert self.step()
        for key, prompt in self.prompts.items():
            tokens = list(prompt)
            for token in self.answers[key]:
                assert token == next_token(tokens)
                tokens.append(token)

    @property
    def drafted(self) -> int:
        return self.scheduler.load().drafted_tokens


def play(harness: Harness, steps: int) -> None:
    """Requests of few prompts, some of which are cancelled, and forks of others."""
    random, batch = harness.random, harness.scheduler.batch
    for _ in range(steps):
        if random.random() < 0.3 and len(batch.live) < 9:
            length = random.randint(1, 26)
            first = random.choice((1, 50))
            prompt = [first + i for i in range(length)]
            harness.add(prompt, random.randint(1, MOST - length), priority=random.randint(0, 1))
        if random.random() < 0.1 and batch.live:
            source = random.choice(sorted(batch.live))
            prompt = harness.prompts[source]
            harness.add(prompt, random.randint(1, MOST - len(prompt)), fork_of=source)
        if random.random() < 0.05 and batch.live:
            batch.cancel(random.choice(sorted(batch.live)))
        harness.step()
    harness.finish()
    assert harness.drafted == harness.scheduler.load().accepted_tokens
    assert harness.speculator.right > 0


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_batch_prefill_tokens": 3},
    "few blocks": {"num_blocks": 17},
    "asked now and then": {"asks": 0.3},
    "asked now and then, few blocks": {"asks": 0.3, "num_blocks": 20},
    "few tokens at once": {"step_tokens": 7},
    "no prefixes": {"prefix_caching": False},
    "many drafts": {"most": 11},
    "one draft": {"most": 1},
    "a device": {"like_a_device": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_proposal_is_right(kind: str, seed: int) -> None:
    harness = Harness(seed, **KINDS[kind])
    play(harness, 150)
    if "blocks" in kind:
        assert harness.scheduler.batch.preemptions


def test_a_draft_model_that_is_the_target_saves_most_steps() -> None:
    harness = Harness(0, most=5)
    harness.add([1, 2, 3], 36)
    harness.finish()
    # The prompt's step gives one token, and each other one the drafts and one more.
    assert len(harness.steps) == 1 + -(-35 // 6)
    assert harness.drafted == harness.scheduler.load().accepted_tokens


def test_without_being_asked_the_draft_model_computes_nothing() -> None:
    harness = Harness(0, asks=0.0)
    harness.add([1, 2, 3], 20)
    harness.finish()
    assert harness.drafted == 0
    assert len(harness.steps) == 20
    assert not harness.model.passes


def test_a_prompt_is_computed_once_drafts_are_wanted_for_its_answer() -> None:
    """Not chunk by chunk beside the target, whose answers may be too short for drafts to pay."""
    harness = Harness(0, max_batch_prefill_tokens=8)
    harness.add(list(range(1, 31)), 10)
    for _ in range(3):
        harness.step()
        assert not harness.model.passes
    harness.step()
    assert harness.model.passes[0] == 31, "the first token of the answer as well"
    harness.finish()


def test_what_the_draft_model_forgets_it_computes_again() -> None:
    harness = Harness(0)
    harness.add(list(range(1, 25)), 20)
    harness.step()
    harness.step()
    harness.draft.forget_computed()
    harness.model.passes.clear()
    harness.step()
    assert harness.model.passes[0] > 24
    harness.finish()


def test_a_context_beyond_that_of_the_draft_model_is_not_drafted_for() -> None:
    harness = Harness(0, draft_tokens=20)
    harness.add([1, 2, 3], 40)
    harness.finish()
    late = [step for step in harness.steps if step.drafts and step.drafts[0].start > 20]
    assert harness.drafted
    assert not late


def test_a_prefix_is_computed_once_by_the_draft_model_too() -> None:
    harness = Harness(0)
    prompt = list(range(1, 25))
    harness.add(prompt, 4)
    harness.finish()
    harness.model.passes.clear()
    harness.add([*prompt, 3], 4)
    harness.finish()
    assert max(harness.model.passes) < len(prompt) // 2
