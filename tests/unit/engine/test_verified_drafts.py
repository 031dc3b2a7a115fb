"""Each step reports the drafts that it has verified, to its clients and to the metrics."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Many
from typing import Any

import pytest

from tests.unit.engine.fake_speculator import DRAFTERS, FakeSpeculator
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli.engine.config import Batching
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown, StepOutputs, VerifiedDrafts
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.sequence import Sequence

COUNT, NEW = 4, 40
EXPECTED = {key: continuation([key, key + 1], NEW, 1000) for key in range(COUNT)}


class Predicting(FakeSpeculator):
    """Takes the drafts of requests with a prediction from there."""

    def propose(self, sequences: Many[Sequence], waiting: bool, others: int = 0) -> list[list[int]]:
        for sequence in sequences:
            sequence.draft_source = "prediction" if sequence.request.prediction else "context"
        return super().propose(sequences, waiting, others)


def served(speculator: FakeSpeculator | None) -> tuple[list[StepOutputs], EngineMetrics]:
    """All outputs of an engine that serves COUNT requests, two of them with a prediction."""
    core = EngineCore(FakeWorker(4), limits(), 0, None, speculator)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    for key in range(COUNT):
        prediction = tuple(EXPECTED[key]) if key % 2 else ()
        core.inbox.put(request(key, [key, key + 1], NEW, prediction=prediction))
    found: list[StepOutputs] = []
    finished = 0
    while finished < COUNT:
        outputs = core.outbox.get(timeout=60)
        assert outputs is not None
        found.append(outputs)
        finished += len(outputs.finished)
    core.inbox.put(Shutdown())
    thread.join(timeout=60)
    return found, core.metrics


def tokens_of(outputs: StepOutputs, key: int) -> list[int]:
    pairs = zip(outputs.request_ids, outputs.token_ids, strict=True)
    return [token for request_id, token in pairs if request_id == key]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_step_gives_its_accepted_drafts_and_one_token_more(kind: str) -> None:
    found, metrics = served(Predicting(kind, EXPECTED.__getitem__))
    answers = {key: [t for o in found for t in tokens_of(o, key)] for key in range(COUNT)}
    assert answers == EXPECTED
    verified: list[VerifiedDrafts] = []
    for outputs in found:
        with_drafts = {drafts.request_id: drafts for drafts in outputs.drafts}
        assert len(with_drafts) == len(outputs.drafts), "a request once in each step"
        verified += outputs.drafts
        for key in set(outputs.request_ids):
            drafts = with_drafts.get(key)
            accepted = 0 if drafts is None else drafts.accepted
            assert len(tokens_of(outputs, key)) == 1 + accepted
    assert verified
    assert all(0 <= drafts.accepted <= drafts.drafted for drafts in verified)
    assert all(drafts.drafted > 0 for drafts in verified)
    assert all(drafts.predicted == (drafts.request_id % 2 == 1) for drafts in verified)
    if kind == "perfect":
        assert all(drafts.accepted == drafts.drafted for drafts in verified)
    accepted = metrics.histograms["accepted_drafts", ""]
    skipped = metrics.histograms["skipped_tokens", ""]
    assert sum(accepted.counts) == len(verified)
    assert accepted.sum == metrics.load.accepted_tokens == skipped.sum
    assert accepted.sum == sum(drafts.accepted for drafts in verified)
    assert metrics.load.drafted_tokens == sum(drafts.drafted for drafts in verified)
    assert sum(skipped.counts) + skipped.sum == COUNT * NEW
    assert metrics.counts["launched", "prefill"] <= COUNT, "drafts are no prefill"


class Noting(FakeSpeculator):
    """Notes of which steps it is told that prompts wait."""

    def __init__(self) -> None:
        super().__init__("wrong", lambda _: [1] * 100)
        self.waiting: list[bool] = []

    def propose(self, sequences: Many[Sequence], waiting: bool, others: int = 0) -> list[list[int]]:
        self.waiting.append(waiting)
        return [[] for _ in sequences]


def told(requests: list[GenerationRequest], steps: int, **changes: Any) -> list[bool]:
    """What a speculator is told of the steps after that of a first request."""
    noting, worker = Noting(), FakeWorker(4)
    scheduler = Scheduler(limits(**changes), speculator=noting)
    scheduler.add(request(0, [1, 2], 30))
    for number in range(steps):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(worker.sample(worker.launch(step)).wait())
        if not number:
            for each in requests:
                scheduler.add(each)
    return noting.waiting


def test_a_speculator_is_told_of_prompts_that_its_step_computes_a_part_of() -> None:
    long = request(1, range(20), 9)
    assert told([long], 6, max_batch_prefill_tokens=8) == [True, True, True, False, False]
    assert told([], 4) == [False] * 3


def test_prompts_that_cannot_start_are_no_part_of_a_step() -> None:
    assert told([request(1, range(20), 9)], 4, max_batch_size=1) == [False] * 3
    apart = {"batching": Batching.INFLIGHT, "waiting_served_ratio": 9.0}
    assert told([request(1, range(20), 9)], 4, **apart) == [False] * 3


def test_without_a_speculator_every_step_gives_one_token() -> None:
    found, metrics = served(None)
    assert not any(outputs.drafts for outputs in found)
    assert metrics.load.drafted_tokens == 0
    skipped = metrics.histograms["skipped_tokens", ""]
    assert (skipped.counts[0], skipped.sum) == (COUNT * NEW, 0)
