"""Several steps in flight, one for each stage of a pipeline."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.unit.engine.fake_grammar import EOS, FakeCompiler, constrained, slots
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_core import running
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import Cancel, FinishReason
from tgi_cli.engine.step import GrammarMatcher, Step, StepResult

Masks = tuple[Sequence[int], Any] | None


class Stages:
    """A fake worker as the last stage of a pipeline, and the rows that the first one has.

    A step is computed when its result is asked for, after later ones were launched. The first stage
    learns of chosen tokens by steps alone.
    """

    grammars = None

    def __init__(self, bounds: SchedulerConfig) -> None:
        self.last = FakeWorker.of(bounds)
        self.first: dict[int, dict[int, int]] = {}
        self.in_flight: deque[Step] = deque()
        self.launched: list[Step] = []
        self.most = 0
        self.masked_beside = 0
        """Steps in flight when one of them was given masks."""
        self.overlapping = 0
        """Steps that compute a sequence of another one in flight: chunks of its prompt."""

    def launch(self, step: Step) -> Step:
        for row in step.freed:
            del self.first[row]
        for new in step.new:
            self.first[new.row] = dict(enumerate(new.token_ids))
        for given in step.forced_tokens:
            self.first[given.row].update(enumerate(given.token_ids, given.start))
        assert len(step.first_tokens) == len(step.rows)
        for row, start, token in zip(step.rows, step.starts, step.first_tokens, strict=True):
            self.first[row][start] = token
        replaced = set(step.freed)
        for earlier in reversed(self.in_flight):
            both = set(step.rows) & set(earlier.rows) - replaced
            assert not any(earlier.samples[earlier.rows.index(row)] for row in both)
            self.overlapping += bool(both)
            replaced |= set(earlier.freed)
        self.in_flight.append(step)
        self.launched.append(step)
        self.most = max(self.most, len(self.in_flight))
        return step

    def read(self, step: Step) -> list[list[int]]:
        """The tokens that the first stage computes, by entry."""
        entries = zip(step.rows, step.starts, step.counts, strict=True)
        return [[self.first[row][start + i] for i in range(count)] for row, start, count in entries]

    def sample(self, handle: object, masks: Masks = None) -> _Deferred:
        assert isinstance(handle, Step)
        if masks is not None:
            masks = (list(masks[0]), np.array(masks[1]))
            self.masked_beside = max(self.masked_beside, len(self.in_flight))
        return _Deferred(self, handle, masks, self.read(handle))

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        raise AssertionError("there are no adapters")

    def forget_adapter(self, adapter_id: int) -> None:
        raise AssertionError("there are no adapters")


class _Deferred:
    def __init__(self, stages: Stages, step: Step, masks: Masks, read: list[list[int]]) -> None:
        self._stages = stages
        self._step = step
        self._masks = masks
        self._read = read

    def wait(self) -> StepResult:
        stages, step = self._stages, self._step
        assert stages.in_flight.popleft() is step, "out of order"
        handle = stages.last.launch(step)
        rows = stages.last.rows
        entries = zip(step.rows, step.starts, step.counts, strict=True)
        chosen = [[rows[row].tokens[s + i] for i in range(count)] for row, s, count in entries]
        assert chosen == self._read, "the first stage has computed other tokens than were chosen"
        return stages.last.sample(handle, self._masks).wait()


class ReusingCompiler(FakeCompiler):
    """Fills the same memory each time."""

    _memory: Any = None

    def fill(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> Any:
        if self._memory is not None:
            self._memory[:] = 0
        filled = np.array(super().fill(matchers, drafts))
        if self._memory is None or self._memory.shape != filled.shape:
            self._memory = filled
        self._memory[:] = filled
        return self._memory


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_get_the_tokens_of_one_step_at_a_time(seed: int, stages: int) -> None:
    random_ = random.Random(seed)
    bounds = limits(
        num_blocks=random_.choice([25, 30, 128]),
        max_total_tokens=96,
        max_batch_prefill_tokens=random_.choice([3, 16, 64]),
        prefix_caching=random_.random() < 0.7,
        pipeline_parallel_size=stages,
    )
    families = [[random_.randrange(1000) for _ in range(40)] for _ in range(3)]
    worker = Stages(bounds)
    expected: dict[int, list[int]] = {}
    asked = []
    for i in range(40):
        prompt = random_.choice(families)[: random_.randint(1, 40)]
        prompt = prompt + [random_.randrange(1000) for _ in range(random_.randint(0, 12))]
        new = random_.randint(1, 96 - len(prompt))
        expected[i] = continuation(prompt, new, 1000)
        asked.append(request(i, prompt, new, priority=random_.choice([0, 0, 1])))
    together = 8  # enough for all stages, whenever the others arrive
    first = asked[:together]
    with running(worker, bounds, stages - 1, requests=first) as client:  # type: ignore[arg-type]
        for i in range(together, 40):
            client.core.inbox.put(asked[i])
            if random_.random() < 0.2:
                client.core.inbox.put(Cancel(random_.randrange(i + 1)))
            if random_.random() < 0.5 and client.core.live_requests:
                client.read()
        client.read_until_finished(*expected)
        assert client.core.metrics.load.used_blocks == 0
    for i, answer in expected.items():
        seen = client.tokens.get(i, [])
        if client.finished[i][0] is FinishReason.CANCELLED:
            answer = answer[: len(seen)]
        assert seen == answer
    assert worker.most == stages


@pytest.mark.parametrize(("requests", "stages"), [(2, 2), (7, 3), (8, 2)])
def test_decodes_are_shared_out_evenly_and_all_stages_have_work(requests: int, stages: int) -> None:
    bounds = limits(pipeline_parallel_size=stages)
    worker = Stages(bounds)
    asked = [request(i, [i], 60) for i in range(requests)]
    with running(worker, bounds, stages - 1, requests=asked) as client:  # type: ignore[arg-type]
        client.read_until_finished(*range(requests))
    share = -(-requests // stages)
    sizes = [step.num_decodes for step in worker.launched if step.num_decodes]
    assert max(sizes) <= share
    assert sum(sizes) / len(sizes) > 0.8 * requests / stages
    assert worker.most == stages
    assert len(set(sizes[5:40])) <= 2


def test_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    bounds = limits(max_batch_prefill_tokens=8, pipeline_parallel_size=2)
    worker = Stages(bounds)
    with running(worker, bounds, 1) as client:  # type: ignore[arg-type]
        client.core.inbox.put(request(0, range(60), 5))
        client.read_until_finished(0)
    assert worker.overlapping >= 6
    assert client.tokens[0] == continuation(range(60), 5, 1000)


def test_grammars_do_not_empty_the_pipeline() -> None:
    bounds = limits(pipeline_parallel_size=2)
    worker = Stages(bounds)
    grammar = slots(range(100, 120), [11], [12], range(30), repeat=True)
    given = {"grammar": grammar, "stop_token_ids": frozenset({EOS})}
    asked = [request(i, [i, 7], 24, **(given if i % 2 else {})) for i in range(6)]
    compiler = ReusingCompiler()
    with running(worker, bounds, 1, compiler, asked) as client:  # type: ignore[arg-type]
        client.read_until_finished(*range(6))
    for i in range(6):
        wanted = constrained([i, 7], 24, grammar) if i % 2 else continuation([i, 7], 24, 1000)
        assert client.tokens[i] == wanted
    assert worker.masked_beside == 2
