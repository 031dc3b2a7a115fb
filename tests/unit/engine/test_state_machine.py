"""The engine's invariants hold for any order of operations.

Hypothesis plays clients (add, fork, cancel, load and unload adapters) and the loop (launch a
step, take in a result, up to two in flight or one for each pipeline stage, a step that breaks, an
adapter that is read or a grammar that is compiled late, copies of blocks that are read late or
lost, steps that take long) against a plain model: what each request must answer.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.engine.fake_blocks import FakeBlockStore
from tests.unit.engine.fake_grammar import EOS, FakeCompiler, constrained, slots
from tests.unit.engine.fake_images import image, image_request, seen
from tests.unit.engine.fake_speculator import DRAFTERS, FakeSpeculator
from tests.unit.engine.fake_thinking import budget, budgeted
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_scheduler import limits
from tgi_cli.config import EncoderLimits
from tgi_cli.engine.config import Batching, CapacityPolicy
from tgi_cli.engine.messages import Finished, FinishReason, ImageInput, LoadAdapter, StepOutputs
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.sequence import Sequence, Status
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.lookup import GrammarDrafter, LookupDrafter
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import PendingResult, Step, StepTime

MOST = 48
GRAMMARS = [
    slots(range(100, 120), [11], [12], [13], range(30), repeat=True),
    slots([21], range(100, 120), *([i] for i in range(30, 50))),
]
RULES_OF_REQUESTS = st.sampled_from(
    [
        {},
        *({"grammar": grammar} for grammar in GRAMMARS),
        *({"thinking": budget(tokens)} for tokens in (0, 3, 12)),
    ]
)
ENCODERS = st.sampled_from(
    [
        None,
        EncoderLimits(layers=1, row_cost=0.1, cache_rows=13),
        EncoderLimits(layers=4, row_cost=2.0, cache_rows=13),
        EncoderLimits(layers=3, row_cost=40.0, cache_rows=60),
        EncoderLimits(layers=3, row_cost=2.0, cache_rows=13, token_seconds=0.3, step_seconds=0.7),
        EncoderLimits(
            layers=2,
            row_cost=2.0,
            cache_rows=13,
            token_seconds=0.3,
            step_seconds=0.7,
            interrupts=True,
        ),
    ]
)
PIXELS = st.sampled_from([b"cat", b"dog", b"ox", b"cat", b"dog", b"cat", b"dog", b"unreadable"])
"""Few, at few places, so that prompts differ in an image alone."""
ROWS_FOR_NOTHING = [StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.001)]
EXAMPLES, RULES = 120, 100
"""Together at least 10,000 steps of the machine."""


class Engine(RuleBasedStateMachine):
    """A scheduler, the steps in flight, and clients.

    Args:
        drafter: what drafts: one of ``DRAFTERS``, "looks up" or "proposes"; None for no drafts.
            With drafts there are no recurrent states and no pipeline stages.
        drafts: counts the drafts that steps verify.
    """

    def __init__(self, drafter: str | None = None, drafts: Counter[str] | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.drafts = Counter() if drafts is None else drafts

    @initialize(
        block_size=st.sampled_from([1, 3, 8]),
        spare_blocks=st.sampled_from([0, 1, 50]),
        prefill=st.sampled_from([3, 16, 64]),
        rows=st.integers(3, 6),
        prefix_caching=st.sampled_from([True, True, False]),
        window=st.sampled_from([None, None, 6]),
        batching=st.sampled_from([Batching.FUSED, *Batching]),
        policy=st.sampled_from([CapacityPolicy.MAX_UTILIZATION, *CapacityPolicy]),
        loras=st.sampled_from([0, 1, 2]),
        cpu_loras=st.sampled_from([1, 2, 9]),
        snapshots=st.sampled_from([None, 0, 1, 2, 5, 20]),
        encoder=ENCODERS,
        bidirectional=st.booleans(),
        whole_prompts=st.sampled_from([False, False, False, True]),
        keeps=st.booleans(),
        host_blocks=st.sampled_from([0, 1, 4, 60]),
        stages=st.sampled_from([1, 1, 1, 2, 3]),
        delay=st.sampled_from([0, 100]),
    )
    def start(
        self, block_size: int, spare_blocks: int, prefill: int, rows: int, **more: Any
    ) -> None:
        if self.drafter is not None:
            more |= {"snapshots": None, "stages": 1}
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
            max_loras=more["loras"],
            max_cpu_loras=more["cpu_loras"],
            num_state_slots=0 if more["snapshots"] is None else rows + more["snapshots"],
            encoder=more["encoder"] if more["stages"] == 1 else None,
            pipeline_parallel_size=more["stages"],
            max_prefill_delay=more["delay"],
            token_seconds=0.01,
            whole_prompts=more["whole_prompts"] and prefill > 16,
            num_host_blocks=0
            if more["keeps"] or more["snapshots"] is not None
            else more["host_blocks"],
        )
        self.stages = more["stages"]
        self.bidirectional = more["bidirectional"]
        self.worker = FakeWorker.of(bounds, window=more["window"], slow=True)
        self.worker.unreadable = {b"unreadable"}
        self.compiler = FakeCompiler(slow=True)
        self.speculator: FakeSpeculator | AdaptiveSpeculator | None = None
        if self.drafter in ("looks up", "proposes"):
            drafters = (GrammarDrafter(), LookupDrafter())
            most = 5 if self.drafter == "proposes" else 0
            costs = StepCosts(ROWS_FOR_NOTHING, 7)
            self.speculator = AdaptiveSpeculator(7, costs, drafters, most_proposed=most)
        elif self.drafter is not None:
            self.speculator = FakeSpeculator(
                self.drafter, lambda key: self.expected[key], rests=0.3
            )
        keeps = more["keeps"] and more["snapshots"] is None
        self.blocks = FakeBlockStore(self.worker) if keeps else None
        self.scheduler = Scheduler(bounds, self.worker, self.compiler, self.speculator, self.blocks)
        self.batch = self.scheduler.batch
        self.adapters: list[int] = []
        self.used_adapters: dict[int, int] = {}
        self.pending: deque[tuple[Step, PendingResult]] = deque()
        self.expected: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.images: dict[int, tuple[ImageInput, ...]] = {}
        self.seen: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.idle_steps = 0

    # ------------------------------------------------------------------ clients

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 16),
        new=st.integers(1, 32),
        priority=st.integers(-1, 1),
        rules=RULES_OF_REQUESTS,
        data=st.data(),
    )
    def add(
        self,
        family: int,
        length: int,
        new: int,
        priority: int,
        rules: dict[str, Any],
        data: st.DataObject,
    ) -> None:
        adapter_id = data.draw(st.sampled_from([0, *self.adapters])) if self.adapters else 0
        prompt = [family * 100 + i for i in range(length)]
        prompt, images = self._with_images(prompt, data)
        self._add(prompt, new, images, priority=priority, adapter_id=adapter_id, **rules)

    def _with_images(
        self, text: list[int], data: st.DataObject
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """A prompt of the text with up to two images between its tokens."""
        prompt: list[int] = []
        images = []
        count = data.draw(st.integers(0, 2)) if self.scheduler.config.encoder else 0
        for _ in range(count):
            place = min(len(text), data.draw(st.sampled_from([0, 2, 5])))
            prompt, text = prompt + text[:place], text[place:]
            spans = []
            for rows in data.draw(st.sampled_from([(3,), (3,), (1, 2)])):
                spans.append((len(prompt), rows))
                prompt += [0] * rows + [7]
            pixels = data.draw(PIXELS)
            images.append(image(pixels, *spans, bidirectional=self.bidirectional))
        if images and data.draw(st.integers(0, 2)) == 0:
            prompt.pop()  # it ends with an image
            return prompt, tuple(images)
        return prompt + text, tuple(images)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), new=st.integers(1, 32), rules=RULES_OF_REQUESTS)
    def fork(self, data: st.DataObject, new: int, rules: dict[str, Any]) -> None:
        source = data.draw(st.sampled_from(sorted(self.live)))
        adapter_id = self.used_adapters[source]
        if not adapter_id or adapter_id in self.adapters:
            prompt, images = self.prompts[source], self.images[source]
            self._add(prompt, new, images, fork_of=source, adapter_id=adapter_id, **rules)

    def _add(
        self, prompt: list[int], new: int, images: tuple[ImageInput, ...], **more: Any
    ) -> None:
        request_id, new = len(self.expected), min(new, MOST - len(prompt))
        whole = self.scheduler.config.whole_prompts
        shown = seen(image_request(request_id, prompt, new, *images), whole)
        self.worker.seen[request_id] = shown
        grammar, thinking = more.get("grammar"), more.get("thinking")
        adapter_id = more["adapter_id"]
        stops = frozenset({EOS} if grammar else ())
        self.used_adapters[request_id] = adapter_id
        if grammar:
            self.expected[request_id] = constrained(shown, new, grammar, adapter_id)
        elif thinking:
            self.expected[request_id] = budgeted(shown, new, thinking, adapter_id)
        else:
            self.expected[request_id] = continuation(shown, new, 1000, adapter_id)
        # Every third token of the prediction is another one.
        answer = self.expected[request_id]
        prediction = tuple(t + (i % 3 == request_id % 5) for i, t in enumerate(answer))
        more |= {"stop_token_ids": stops, "prediction": prediction}
        sent = image_request(request_id, prompt, new, *images, **more)
        assert self.scheduler.add(sent) is None
        self.prompts[request_id] = prompt
        self.images[request_id] = images
        self.seen[request_id] = []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.live)))
        ended = self.batch.cancel(victim)
        assert ended is not None
        self._end(ended)

    @precondition(lambda self: self.scheduler.config.max_loras and len(self.adapters) < 4)
    @rule()
    def load(self) -> None:
        self.loads = getattr(self, "loads", 0) + 1
        self.batch.adapters.load(LoadAdapter(self.loads, str(self.loads), ""))
        self.adapters.append(self.loads)

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(self.adapters))
        self.adapters.remove(adapter_id)
        self.batch.adapters.unload(adapter_id)

    # ------------------------------------------------------------------ the loop

    @precondition(lambda self: self.worker.readings)
    @rule()
    def read(self) -> None:
        self.worker.finish_reading(next(iter(self.worker.readings)))
        assert not self.batch.fail_adapters(self.batch.adapters.collect())
        self.batch.adapters.read_wanted()

    @precondition(lambda self: self.compiler.waiting)
    @rule()
    def compile(self) -> None:
        self.compiler.finish()
        assert not self.batch.collect_grammars()

    @precondition(lambda self: self.blocks is not None and self.blocks.pending)
    @rule(count=st.sampled_from([100, 100, 1, 0]))
    def read_blocks(self, count: int) -> None:
        assert self.blocks is not None
        self.blocks.pending[0].finish(count)

    @precondition(lambda self: self.blocks is not None)
    @rule(busy=st.booleans())
    def keep_blocks_busy(self, busy: bool) -> None:
        assert self.blocks is not None
        self.blocks.busy = busy

    @precondition(lambda self: self.blocks is not None and self.blocks.saved)
    @rule(data=st.data())
    def lose_a_copy(self, data: st.DataObject) -> None:
        assert self.blocks is not None
        del self.blocks.saved[data.draw(st.sampled_from(list(self.blocks.saved)))]

    @precondition(lambda self: self.blocks is not None)
    @rule()
    def forget_cached_blocks(self) -> None:
        """As after a restart: nothing is found in memory but what runs."""
        pool = self.batch.pool
        for block in range(pool.num_blocks):
            if not pool.is_used(block):
                pool.forget(block)
                for offset in range(self.worker.block_size):
                    self.worker.kv.pop((block, offset), None)

    @precondition(lambda self: len(self.pending) < max(2, self.stages))
    @rule(breaks=st.integers(0, 30), waits=st.booleans())
    def launch(self, breaks: int, waits: bool) -> None:
        while waits and self.pending and self.scheduler.may_draft:
            self.collect(0.05)
        step = self.scheduler.schedule()
        if step is None:
            self.batch.adapters.read_wanted()
            awaited = self.pending or self.worker.readings or self.compiler.waiting
            awaited = awaited or (self.blocks is not None and self.blocks.pending)
            self.idle_steps += bool(self.live) and not awaited
            assert not self.idle_steps, "requests wait and nothing is scheduled"
            return
        self.idle_steps = 0
        if breaks == 0 and not self.pending:
            self.worker.fail_when = lambda step: RuntimeError("broke")
        try:
            handle = self.worker.launch(step)
            masks = None
            if self.stages > 1:
                rows, places = self.worker.rows, zip(step.rows, step.starts, strict=True)
                assert step.first_tokens == [rows[row].tokens[start] for row, start in places]
            if self.batch.grammars.needs_mask:
                while self.pending and self.stages == 1:
                    self.collect(0.05)
                masks = self.batch.grammars.masks()
            self.pending.append((step, self.worker.sample(handle, masks)))
        except RuntimeError:
            self._take(self.scheduler.fail("broke"))
        self.worker.fail_when = lambda step: None
        self.batch.adapters.read_wanted()

    @precondition(lambda self: self.pending)
    @rule(seconds=st.sampled_from([0.0, 0.01, 0.05, 0.2, 3.0]))
    def collect(self, seconds: float) -> None:
        step, pending = self.pending.popleft()
        result = pending.wait()
        self._take(self.scheduler.update(result))
        self.batch.resources.pace.learn(step, seconds, result.encodes.seconds)
        if self.speculator is not None:
            self.speculator.timed(step, 1.0)

    def _take(self, outputs: StepOutputs) -> None:
        for verified in outputs.drafts:
            self.drafts["accepted"] += verified.accepted
            self.drafts["rejected"] += verified.drafted - verified.accepted
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            assert request_id not in self.finished, "a token after the end"
            self.seen[request_id].append(token)
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
        for request_id, found in getattr(self, "seen", {}).items():
            assert found == self.expected[request_id][: len(found)]
            finished = self.finished.get(request_id)
            whole = (FinishReason.LENGTH, FinishReason.EOS_TOKEN)
            if finished is not None and finished.reason in whole:
                assert found == self.expected[request_id]

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        held = [block for s in self.batch.running for block in s.block_ids[s.num_window_freed :]]
        assert self.batch.pool.num_used == len(set(held))
        for sequence in self.batch.running:
            self._check(sequence)
        rows = [s.row for s in self.batch.running]
        assert len(set(rows)) == len(rows)
        assert len(self.batch.live) == len(self.live)

    @invariant()
    def every_row_has_a_state_slot_of_its_own(self) -> None:
        if not hasattr(self, "scheduler") or self.batch.resources.states is None:
            return
        pool = self.batch.resources.states.pool
        own = [sequence.state_slot for sequence in self.batch.running]
        assert len(set(own)) == len(own)
        assert all(map(pool.is_used, own))
        free_rows = self.scheduler.config.max_batch_size - len(own)
        assert pool.num_available >= free_rows, "a snapshot has taken the slot of a row"

    @invariant()
    def images_add_up(self) -> None:
        if not hasattr(self, "scheduler") or self.batch.resources.images is None:
            return
        cache = self.batch.resources.images.cache
        held = [each for s in self.batch.running for each in s.held_images.values()]
        assert all(each.references == count for each, count in Counter(held).items())
        assert cache.num_used == sum(each.rows for each in set(held) - cache.failed)
        assert cache.num_used + cache.num_cached <= cache.num_rows
        assert cache.current is None or cache.current in held

    @invariant()
    def adapters_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        bounds = self.scheduler.config
        running = {s.request.adapter_id for s in self.batch.running} - {0}
        assert len(running) <= bounds.max_loras
        assert len(self.worker.held) + len(self.worker.readings) <= bounds.max_cpu_loras

    def _check(self, sequence: Sequence) -> None:
        assert sequence.status is Status.RUNNING
        assert sequence.num_computed <= sequence.num_tokens
        assert sequence.num_tokens <= sequence.max_tokens
        assert sequence.placeholders <= len(self.pending)
        capacity = len(sequence.block_ids) * self.scheduler.config.block_size
        assert sequence.num_computed <= capacity

    def teardown(self) -> None:
        """Everything that lives comes to its end, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.live and not self.pending:
                break
            if len(self.pending) < 2:
                self.launch(1, True)
            if self.pending:
                self.collect(0.05)
            if self.worker.readings:
                self.read()
            if self.compiler.waiting:
                self.compile()
            if self.blocks is not None and self.blocks.pending:
                self.read_blocks(100)
        assert not self.live, "no progress"
        assert self.blocks is None or all(read.taken for read in self.blocks.reads)
        self.answers_are_right_so_far()
        assert self.batch.pool.num_used == 0
        if isinstance(self.speculator, FakeSpeculator):
            assert sorted(self.speculator.finished) == sorted(self.expected)
            load = self.scheduler.load()
            assert self.speculator.drafted <= load.drafted_tokens  # steps that broke
            assert self.speculator.accepted == load.accepted_tokens
        states = self.batch.resources.states
        assert states is None or states.pool.num_used == 0
        images = self.batch.resources.images
        assert images is None or not (images.cache.num_used or images.cache.failed)


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=RULES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestEngine = Engine.TestCase
TestEngine.settings = SETTINGS


@pytest.mark.parametrize("drafter", ["looks up", "proposes", *DRAFTERS])
def test_drafts_change_no_answer(drafter: str) -> None:
    drafts: Counter[str] = Counter()
    more = settings(SETTINGS, max_examples=EXAMPLES // 4)
    run_state_machine_as_test(lambda: Engine(drafter, drafts), settings=more)
    assert drafts["rejected"] > 100 or drafter == "perfect"
    assert drafts["accepted"] > 100 or drafter in ("wrong", "random", "repeats")
