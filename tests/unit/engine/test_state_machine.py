"""Whatever is asked of the engine, in whatever order: the invariants hold.

Hypothesis plays clients (add, fork, cancel) and the loop (launch a step, take in a result, up
to two in flight, a step that breaks) against a plain model: what each request must answer.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli.engine.limits import Batching, CapacityPolicy
from tgi_cli.engine.messages import Finished, FinishReason, StepOutputs
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.sequence import Sequence, Status
from tgi_cli.engine.step import PendingResult

MOST = 48
EXAMPLES, RULES = 120, 100
"""Together at least 10,000 steps of the machine."""


class Engine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 3, 8]),
        spare_blocks=st.sampled_from([0, 1, 50]),
        prefill=st.sampled_from([3, 16, 64]),
        rows=st.integers(3, 6),
        prefix_caching=st.booleans(),
        window=st.sampled_from([None, None, 6]),
        batching=st.sampled_from([Batching.FUSED, *Batching]),
        policy=st.sampled_from([CapacityPolicy.MAX_UTILIZATION, *CapacityPolicy]),
    )
    def start(
        self, block_size: int, spare_blocks: int, prefill: int, rows: int, **more: Any
    ) -> None:
        bounds = limits(
            block_size=block_size,
            num_blocks=-(-MOST // block_size) + spare_blocks,
            max_total_tokens=MOST,
            max_batch_prefill_tokens=prefill,
            max_batch_size=rows,
            prefix_caching=more["prefix_caching"],
            window=more["window"],
            batching=more["batching"],
            capacity_policy=more["policy"],
        )
        self.scheduler = Scheduler(bounds)
        self.worker = FakeWorker(block_size, window=more["window"])
        self.pending: deque[PendingResult] = deque()
        self.expected: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.told: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.idle_steps = 0

    # ------------------------------------------------------------------ clients

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 16),
        new=st.integers(1, 32),
        priority=st.integers(-1, 1),
    )
    def add(self, family: int, length: int, new: int, priority: int) -> None:
        self._add([family * 100 + i for i in range(length)], new, priority=priority)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), new=st.integers(1, 32))
    def fork(self, data: st.DataObject, new: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.live)))
        self._add(self.prompts[source], new, fork_of=source)

    def _add(self, prompt: list[int], new: int, **more: Any) -> None:
        request_id = len(self.expected)
        assert self.scheduler.add(request(request_id, prompt, new, **more)) is None
        self.expected[request_id] = continuation(prompt, new, 1000)
        self.prompts[request_id] = prompt
        self.told[request_id] = []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.live)))
        ended = self.scheduler.cancel(victim)
        assert ended is not None
        self._end(ended)

    # ------------------------------------------------------------------ the loop

    @precondition(lambda self: len(self.pending) < 2)
    @rule(breaks=st.integers(0, 30))
    def launch(self, breaks: int) -> None:
        step = self.scheduler.schedule()
        if step is None:
            self.idle_steps += bool(self.live) and not self.pending
            assert not self.idle_steps, "requests wait and nothing is scheduled"
            return
        self.idle_steps = 0
        if breaks == 0 and not self.pending:
            self.worker.fail_when = lambda step: RuntimeError("broke")
        try:
            self.pending.append(self.worker.sample(self.worker.launch(step)))
        except RuntimeError:
            self._take(self.scheduler.fail("broke"))
        self.worker.fail_when = lambda step: None

    @precondition(lambda self: self.pending)
    @rule()
    def collect(self) -> None:
        self._take(self.scheduler.update(self.pending.popleft().wait()))

    def _take(self, outputs: StepOutputs) -> None:
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            assert request_id not in self.finished, "a token after the end"
            self.told[request_id].append(token)
        for finished in outputs.finished:
            self._end(finished)

    def _end(self, finished: Finished) -> None:
        assert finished.request_id not in self.finished, "ended twice"
        self.finished[finished.request_id] = finished

    # ------------------------------------------------------------------ what always holds

    @property
    def live(self) -> set[int]:
        return set(self.expected) - set(self.finished)

    @invariant()
    def answers_are_right_so_far(self) -> None:
        for request_id, told in getattr(self, "told", {}).items():
            assert told == self.expected[request_id][: len(told)]
            finished = self.finished.get(request_id)
            if finished is not None and finished.reason is FinishReason.LENGTH:
                assert told == self.expected[request_id]

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        held = [block for s in self.scheduler.running for block in s.block_ids[s.num_left :]]
        assert self.scheduler.pool.num_used == len(set(held))
        for sequence in self.scheduler.running:
            self._check(sequence)
        rows = [s.row for s in self.scheduler.running]
        assert len(set(rows)) == len(rows)
        assert self.scheduler.num_live == len(self.live)

    def _check(self, sequence: Sequence) -> None:
        assert sequence.status is Status.RUNNING
        assert sequence.num_computed <= sequence.num_tokens
        assert sequence.num_tokens <= sequence.max_tokens
        assert sequence.placeholders <= len(self.pending)
        capacity = len(sequence.block_ids) * self.scheduler.limits.block_size
        assert sequence.num_computed <= capacity

    def teardown(self) -> None:
        """Everything that lives comes to its end, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.live and not self.pending:
                break
            if len(self.pending) < 2:
                self.launch(1)
            if self.pending:
                self.collect()
        assert not self.live, "no progress"
        self.answers_are_right_so_far()
        assert self.scheduler.pool.num_used == 0


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=RULES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
