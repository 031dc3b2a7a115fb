"""Which waiting sequences get a row and blocks in the next step."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tgi_cli.engine.batch import Batch
from tgi_cli.engine.batching_policy import BatchingPolicy
from tgi_cli.engine.grammar import Grammars
from tgi_cli.engine.kv_cache import Prefix
from tgi_cli.engine.messages import Started
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Step

MAX_LOOKAHEAD = 32
"""Sequences that do not fit and are passed over in one step; bounds the cost of a long queue."""

MAX_PASSED = 1024
"""Sequences that are passed over in one step because their adapter, grammar or parent is not ready,
which is cheap to check."""


class AdmissionPolicy:
    """Admits sequences as the batching policy, budget, rows, blocks and adapters allow."""

    def __init__(self, batch: Batch, policy: BatchingPolicy) -> None:
        self._batch = batch
        self._cache = batch.cache
        self._adapters = batch.adapters
        self._waiting = batch.waiting
        self._block_size = batch.config.block_size
        self._policy = policy
        self._loads = batch.resources.loads
        self._started: list[Started] = []

    def take_started(self) -> list[Started]:
        """The requests that got their first row since the last call."""
        started, self._started = self._started, []
        return started

    def admit(self, step: Step, budget: int, alone: bool) -> Iterator[tuple[Sequence, int]]:
        """Admit waiting sequences in order of priority; one that does not fit lets others pass.

        Args:
            step: gets the rows of admitted sequences.
            budget: tokens that the step may still compute.
            alone: whether the step computes nothing yet.

        Yields:
            Each admitted sequence with the number of its tokens that the step is to compute.
        """
        policy, waiting = self._policy, self._waiting
        free_rows = self._batch.resources.free_rows
        skipped = misfits = 0
        fewest, most = policy.window(len(self._batch.running))
        if fewest > 1 and self._fitting(budget) < fewest:
            return
        while most and free_rows and skipped < min(len(waiting), MAX_PASSED):
            if budget == 0 and not policy.gathers:
                break
            starved = waiting.starved()
            if starved and self._must_wait(starved, step):
                starved = None
            sequence = starved or waiting.ranked(skipped)
            if self._must_wait(sequence, step):
                skipped += 1
                continue
            if not self._adapters.has_slot(sequence.request.adapter_id):
                if starved:
                    break
                skipped += 1
                continue
            parent = self._parent(sequence)
            if parent is None:
                prefix = self._cache.match(sequence)
            else:
                whole = (sequence.prompt_tokens - 1) // self._block_size
                prefix = Prefix(parent.block_ids[:whole], parent.prompt_state)
            known = len(prefix.blocks)
            if parent is None:
                known += self._loads.num_ready(sequence, known)
            pending = sequence.num_tokens - known * self._block_size
            # A prompt that runs whole must fit the budget, unless it exceeds any: then it is split.
            too_long = policy.strict and pending > budget and not alone
            if too_long or not self._admit(step, sequence, prefix, parent):
                if starved or policy.strict or misfits == MAX_LOOKAHEAD:
                    break
                misfits += 1
                skipped += 1
                continue
            count, budget = self._batch.plan(step, sequence, budget)
            most -= 1
            alone = False
            policy.joined()
            yield sequence, count

    def _parent(self, sequence: Sequence) -> Sequence | None:
        """The sequence that a new one is forked from, if it still has the KV of the prompt.

        Without one, after a preemption or with a sliding window, the fork computes its own.
        """
        source = sequence.request.fork_of
        if source is None or sequence.attempt:
            return None
        parent = self._batch.live.get(source)
        if parent is None or parent.attempt or parent.num_window_freed:
            return None
        if self._cache.states is not None and parent.prompt_step >= 0 > parent.prompt_state:
            return None  # it had none to spare, or has no whole block before its last token
        return parent

    def _must_wait(self, sequence: Sequence, step: Step) -> bool:
        """Whether a sequence waits for anything besides a row and blocks.

        Its adapter or its KV is being read, its grammar compiled, or this step or a later one
        computes the prompt that it shares as a fork.
        """
        if not self._is_ready(sequence):
            return True
        parent = self._parent(sequence)
        return parent is not None and parent.prompt_step in (-1, step.step_id)

    def _is_ready(self, sequence: Sequence) -> bool:
        adapter = self._adapters.is_ready(sequence.request.adapter_id)
        return adapter and Grammars.is_ready(sequence) and self._loads.is_ready(sequence)

    def _fitting(self, budget: int) -> int:
        """How many waiting sequences, strictly in order, fit budget and pool together."""
        blocks = self._cache.pool.num_available
        count = 0
        for index in range(len(self._waiting)):
            sequence = self._waiting.ranked(index)
            if not self._is_ready(sequence):
                continue
            cached = len(self._cache.match(sequence).blocks)
            budget -= sequence.num_tokens - cached * self._block_size
            blocks -= self._cache.demand(sequence) - cached
            if budget < 0 or blocks < 0:
                return count
            count += 1
        return count

    def _admit(
        self, step: Step, sequence: Sequence, prefix: Prefix, parent: Sequence | None
    ) -> bool:
        """Give a waiting sequence a row and the blocks of its known tokens, if they fit."""
        if not self._cache.admit(sequence, prefix, self._batch.running):
            return False
        if parent is not None and self._cache.states is None:
            # Only the prompt's last token is left to compute: its logits choose the first new
            # one. The block that holds it is written by both, so each has its own.
            if (sequence.prompt_tokens - 1) % self._block_size:
                last = len(prefix.blocks)
                step.copies.append((parent.block_ids[last], sequence.block_ids[last]))
            sequence.num_computed = sequence.prompt_tokens - 1
        elif parent is None:
            self._loads.apply(step, sequence, len(prefix.blocks))
        if self._batch.run(sequence, step):
            waited = time.monotonic_ns() - sequence.arrival_ns
            self._started.append(
                Started(sequence.request.request_id, waited, sequence.num_computed)
            )
        return True
