"""Who among the waiting gets a row and blocks in the next step."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

from tgi_cli.engine.batching_policy import BatchingPolicy
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.grammar import Grammars
from tgi_cli.engine.kv_cache import KVCache
from tgi_cli.engine.lora_slots import LoraSlots
from tgi_cli.engine.messages import Started
from tgi_cli.engine.optional_outputs import extras_of
from tgi_cli.engine.sequence import Sequence, Status
from tgi_cli.engine.step import NewRow, Step
from tgi_cli.engine.waiting_queue import WaitingQueue

MAX_LOOKAHEAD = 32
"""How many that do not fit are looked at in one step: bounds the cost of a long queue."""

MAX_PASSED = 1024
"""The same for those whose adapter, grammar or parent is not there yet: that is seen at once."""


class AdmissionPolicy:
    """Takes sequences from the queue as batching rule, budget, rows, blocks and adapters allow.

    Attributes:
        free_rows: of the worker.
        reused_tokens, prompt_tokens: of all requests that ever started.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        cache: KVCache,
        adapters: LoraSlots,
        waiting: WaitingQueue,
        live: Mapping[int, Sequence],
        rule: BatchingPolicy,
    ) -> None:
        self.free_rows = list(range(limits.max_batch_size - 1, -1, -1))
        self.reused_tokens = 0
        self.prompt_tokens = 0
        self._limits = limits
        self._cache = cache
        self._adapters = adapters
        self._waiting = waiting
        self._live = live
        self._rule = rule
        self._started: list[Started] = []

    def take_started(self) -> list[Started]:
        """The requests that got their first place since the last call."""
        started, self._started = self._started, []
        return started

    def admit(
        self, step: Step, budget: int, running: Collection[Sequence], alone: bool
    ) -> Iterator[tuple[Sequence, int]]:
        """Waiting sequences in order of rank; one that does not fit lets others pass.

        Args:
            step: gets their rows.
            budget: tokens that the step may still compute.
            running: the caller adds to it what is yielded.
            alone: whether the step computes nothing yet.

        Yields:
            Each with the number of its tokens that the step is to compute.
        """
        rule = self._rule
        skipped = misfits = 0
        fewest, most = rule.window(len(running))
        if fewest > 1 and self._fitting(budget) < fewest:
            return
        while most and self.free_rows and skipped < min(len(self._waiting), MAX_PASSED):
            if budget == 0 and not rule.gathers:
                break
            starved = self._waiting.starved()
            if starved and self._comes_later(starved, step):
                starved = None
            sequence = starved or self._waiting.ranked(skipped)
            if self._comes_later(sequence, step):
                skipped += 1
                continue
            if not self._adapters.has_slot(sequence.request.adapter_id):
                if starved:
                    break
                skipped += 1
                continue
            parent = self._parent(sequence)
            cached = self._cache.match(sequence)
            if parent is not None:
                cached = parent.block_ids[: (sequence.prompt_tokens - 1) // self._limits.block_size]
            pending = sequence.num_tokens - len(cached) * self._limits.block_size
            # A whole prompt must fit the budget, but one that never would may be split.
            too_long = rule.strict and pending > budget and not alone
            if too_long or not self._place(step, sequence, cached, parent, running):
                if starved or rule.strict or misfits == MAX_LOOKAHEAD:
                    break
                misfits += 1
                skipped += 1
                continue
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            budget -= count
            most -= 1
            alone = False
            rule.joined()
            yield sequence, count

    def _parent(self, sequence: Sequence) -> Sequence | None:
        """Whom a new sequence forks from, if the KV of that one's prompt is still there.

        Preemption took it, or a sliding window left it behind: the fork stands alone.
        """
        source = sequence.request.fork_of
        parent = None if source is None or sequence.attempt else self._live.get(source)
        return None if parent is None or parent.attempt or parent.num_window_freed else parent

    def _comes_later(self, sequence: Sequence, step: Step) -> bool:
        """Whether something is under way for it that no room in this step can replace.

        Its adapter is being read, its grammar compiled, or the prompt that it forks from is
        computed by this step or a later one.
        """
        if not self._is_ready(sequence):
            return True
        parent = self._parent(sequence)
        return parent is not None and parent.prompt_step in (-1, step.step_id)

    def _is_ready(self, sequence: Sequence) -> bool:
        adapter = self._adapters.is_ready(sequence.request.adapter_id)
        return adapter and Grammars.is_ready(sequence)

    def _fitting(self, budget: int) -> int:
        """How many of the waiting, strictly in order, fit budget and pool together."""
        blocks = self._cache.pool.num_available
        count = 0
        for index in range(len(self._waiting)):
            sequence = self._waiting.ranked(index)
            if not self._is_ready(sequence):
                continue
            cached = len(self._cache.match(sequence))
            budget -= sequence.num_tokens - cached * self._limits.block_size
            blocks -= self._cache.demand(sequence) - cached
            if budget < 0 or blocks < 0:
                return count
            count += 1
        return count

    def _place(
        self,
        step: Step,
        sequence: Sequence,
        cached: list[int],
        parent: Sequence | None,
        running: Collection[Sequence],
    ) -> bool:
        """Give a waiting sequence its row and the blocks of its known tokens, if they fit."""
        if not self._cache.admit(sequence, cached, running):
            return False
        if parent is not None:
            # Only the prompt's last token is left to compute: its logits choose the first new
            # one. The block that holds it is written by both, so each has its own.
            if (sequence.prompt_tokens - 1) % self._limits.block_size:
                last = len(cached)
                step.copies.append((parent.block_ids[last], sequence.block_ids[last]))
            sequence.num_computed = sequence.prompt_tokens - 1
        self._waiting.admit(sequence)
        sequence.row = self.free_rows.pop()
        sequence.status = Status.RUNNING
        step.new.append(
            NewRow(
                row=sequence.row,
                request_id=sequence.request.request_id,
                token_ids=list(sequence.token_ids),
                prompt_tokens=sequence.prompt_tokens,
                block_ids=list(sequence.block_ids),
                sampling=sequence.request.sampling,
                extras=extras_of(sequence.request),
                adapter_slot=self._adapters.enter(sequence.request.adapter_id, step),
            )
        )
        if not sequence.started:
            sequence.started = True
            waited = time.monotonic_ns() - sequence.arrival_ns
            self.reused_tokens += sequence.num_computed
            self.prompt_tokens += sequence.prompt_tokens
            self._started.append(
                Started(sequence.request.request_id, waited, sequence.num_computed)
            )
        return True
