"""Decides what each step computes. Pure bookkeeping over numbers.

One rule: *computed tokens chase known tokens under a token budget*. A sequence with one token
to go is a decode, one with more is a prefill chunk; fresh, cached, chunked and resumed
sequences need no other case. Decodes come first, prefill chunks share what is left of
``max_batch_prefill_tokens`` (continuous batching: Yu et al. 2022, Orca; chunked prefill:
Agrawal et al. 2024, Sarathi-Serve). ``--batching`` may separate the two.

By default blocks are over-committed: a sequence takes them as it grows, and when they run out
the running sequence of the lowest priority is preempted: it releases its blocks and resumes by
recomputation. The sequence of the highest priority is never preempted, and one sequence always
fits the pool, so there is always progress.
"""

from __future__ import annotations

import heapq
import time

from tgi_cli.engine.admission import AdmissionPolicy
from tgi_cli.engine.batch import Batch
from tgi_cli.engine.batching_policy import POLICIES
from tgi_cli.engine.block_store import BlockStore
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import Finished, FinishReason, GenerationRequest, StepOutputs
from tgi_cli.engine.metrics import EngineLoad, StepStats
from tgi_cli.engine.resources import Resources
from tgi_cli.engine.sequence import ScheduledSequence, Sequence, Status
from tgi_cli.engine.speculator import Speculator
from tgi_cli.engine.step import AdapterStore, BlockAppend, GrammarCompiler, Step, StepResult


class Scheduler:
    """Continuous batching: admits, runs, preempts and finishes sequences.

    Call :meth:`schedule` for a step, run it, and pass its result to :meth:`update`, in order;
    up to two steps may be in flight, since scheduling a step needs no token values.

    With pipeline stages, as many steps as stages are in flight, with different sequences: a
    sequence whose next token is being chosen waits for it, since the first stage has to be sent it.
    Decoding sequences are divided evenly among the steps, so that no stage is idle. The chunks of
    a prompt follow each other without waiting.

    Args:
        config: limits of a step and of a request.
        store: reads LoRA adapters, or None if the configuration has no slots for them.
        compiler: compiles grammars, or None to refuse requests that have one.
        speculator: proposes draft tokens; None without speculative decoding.
        blocks: keeps copies of KV blocks, or None for none.

    Attributes:
        batch: the sequences.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        store: AdapterStore | None = None,
        compiler: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
        blocks: BlockStore | None = None,
    ) -> None:
        if speculator is not None and config.num_state_slots:
            raise ValueError("recurrent states cannot be rolled back, which drafts need")
        self.config = config
        self.batch = Batch(Resources(config, store, blocks), compiler, speculator)
        self._policy = POLICIES[config.batching](config)
        self._admission = AdmissionPolicy(self.batch, self._policy)
        self._deadlines: list[tuple[int, int, Sequence]] = []

    # ------------------------------------------------------------------ requests

    def add(self, request: GenerationRequest) -> Finished | None:
        """Queue a request.

        Returns:
            The end of a request that can never run or has the id of a live one (ERROR), or that
            finds the queue full (OVERLOADED). None if it was queued.
        """
        batch, config = self.batch, self.config
        try:
            batch.validate(request)
        except ValueError as error:
            return Finished(request.request_id, FinishReason.ERROR, str(error))
        waiting = batch.waiting
        cause = ""
        if config.max_queued_requests is not None and len(waiting) >= config.max_queued_requests:
            cause = f"{len(waiting)} requests are waiting"
        tokens = waiting.num_tokens + len(request.prompt_ids)
        if config.max_queued_tokens is not None and tokens > config.max_queued_tokens:
            cause = f"{waiting.num_tokens} tokens are waiting to be computed"
        if cause:
            return Finished(request.request_id, FinishReason.OVERLOADED, cause)
        sequence = batch.add(request)
        if request.timeout_seconds is not None:
            deadline = sequence.arrival_ns + int(request.timeout_seconds * 1e9)
            heapq.heappush(self._deadlines, (deadline, sequence.priority_key[1], sequence))
        return None

    def expire(self) -> list[Finished]:
        """End the requests whose timeout has passed."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= time.monotonic_ns():
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.status is not Status.FINISHED:
                cause = f"not done within {sequence.request.timeout_seconds:g} s"
                ended.append(self.batch.finish(sequence, FinishReason.TIMEOUT, cause))
        return ended

    # ------------------------------------------------------------------ steps

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can be computed now.

        Cost at 1 / 32 / 256 decoding sequences, with update(): 4 / 43 / 320 us on one
        2025 server core.
        """
        step = Step(self.batch.resources.steps)
        entries: list[ScheduledSequence] = []
        if self._policy.mixes:
            self._schedule_decodes(step, entries)
            step.num_decodes = len(entries)
            self._schedule_prefills(step, entries)
        else:
            self._schedule_prefills(step, entries)
            if not entries:
                self._schedule_decodes(step, entries)
                step.num_decodes = len(entries)
        if not (entries or step.encodes or step.new or step.appended):
            return None
        speculator = self.batch.speculator
        if speculator is not None and speculator.asks_worker:
            step.proposals = _ask(speculator, entries)
        self.batch.commit(step, entries)
        return step

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest step in flight; returns its outputs for clients."""
        return self.complete(self.batch.update(result))

    def fail(self, cause: str) -> StepOutputs:
        """End the requests of the oldest step in flight, which failed; all others continue."""
        return self.complete(self.batch.fail(cause))

    def complete(self, outputs: StepOutputs) -> StepOutputs:
        """Add what has happened outside of results since the last outputs."""
        outputs.started = self._admission.take_started()
        outputs.adapters = self.batch.adapters.take_answers()
        return outputs

    def _schedule_decodes(self, step: Step, entries: list[ScheduledSequence]) -> None:
        """Schedule all running sequences with one token to compute, those with drafts last.

        With pipeline stages, only those whose tokens are known, and no more than their share.
        """
        block_size, stages = self.config.block_size, self.config.pipeline_parallel_size
        in_stages, share = stages > 1, 0
        if in_stages:
            share = -(-sum(sequence.decodes for sequence in self.batch.running) // stages)
        drafts = self._propose() if self.batch.speculator is not None else {}
        for sequence in list(self.batch.running):
            if sequence.num_drafts or id(sequence) in drafts:
                continue
            if in_stages and (sequence.placeholders or len(entries) >= share):
                continue
            if not sequence.decodes:
                if sequence.first_unsent >= 0:
                    self._has_blocks(step, entries, sequence)  # in order of priority, here as well
                continue
            if sequence.status is not Status.RUNNING or sequence.num_tokens >= sequence.max_tokens:
                continue  # preempted just now, or the steps in flight choose its last token
            full = sequence.num_computed == len(sequence.block_ids) * block_size
            if not full or self._grow(step, entries, sequence):
                self.batch.compute(step, entries, sequence, 1)
        for sequence, tokens in drafts.values():
            start = len(sequence.block_ids)
            taken = self.batch.cache.grow(sequence, sequence.num_tokens + len(tokens))
            if taken:
                step.appended.append(BlockAppend(sequence.row, start, taken))
            self.batch.compute(step, entries, sequence, 1, tokens)
        self._policy.decoded()

    @property
    def may_draft(self) -> bool:
        """Whether the next step may verify drafts, if the results of all others are known first."""
        speculator = self.batch.speculator
        if speculator is None:
            return False
        decodes = [sequence for sequence in self.batch.running if _decodes_next(sequence)]
        takers = [sequence for sequence in decodes if _takes_drafts(sequence)]
        return bool(takers) and speculator.may_propose(takers, len(decodes) - len(takers))

    def _propose(self) -> dict[int, tuple[Sequence, list[int]]]:
        """The sequences that are to verify drafts in the next step, by their ids, and the drafts.

        Blocks for drafts are never taken from another sequence: without enough free ones for all
        known tokens, there are no drafts.
        """
        batch, cache = self.batch, self.batch.cache
        speculator = batch.speculator
        assert speculator is not None
        spare = batch.pool.num_available
        candidates, others = [], 0
        waiting = bool(batch.waiting) and len(batch.running) < self.config.max_batch_size
        for sequence in batch.running:
            spare -= max(0, cache.blocks_for(sequence.num_tokens) - len(sequence.block_ids))
            if _may_draft(sequence):
                candidates.append(sequence)
            elif _decodes_next(sequence):
                others += 1
            elif sequence.num_computed + 1 < sequence.prompt_tokens:
                waiting = True  # the rest of its prompt is
        if spare < 0 or not candidates:
            return {}
        drafts = {}
        proposals = speculator.propose(candidates, waiting and self._policy.mixes, others)
        for sequence, tokens in zip(candidates, proposals, strict=True):
            if sequence.images is not None:
                tokens = sequence.images.drafts(tokens)
            # The step chooses a token after the last draft.
            count = min(len(tokens), sequence.max_tokens - sequence.num_tokens - 1)
            held = max(len(sequence.block_ids), cache.blocks_for(sequence.num_tokens))
            count = min(count, (held + spare) * cache.block_size - sequence.num_tokens)
            if count > 0:
                spare -= max(0, cache.blocks_for(sequence.num_tokens + count) - held)
                drafts[id(sequence)] = (sequence, tokens[:count])
        return drafts

    def _schedule_prefills(self, step: Step, entries: list[ScheduledSequence]) -> None:
        """Schedule chunks of running prompts, then of prompts that are admitted."""
        batch = self.batch
        budget = self.config.prefill_budget(len(entries))
        budget = batch.begin_prefills(budget, waits=bool(entries))
        for sequence in list(batch.running):
            pending = sequence.num_tokens - sequence.num_computed
            wants = pending > 1 or sequence.num_computed < sequence.images_end
            if budget > 0 and wants and self._has_blocks(step, entries, sequence):
                count, budget = batch.plan(step, sequence, budget)
                if count:
                    batch.compute(step, entries, sequence, count)
        if self._policy.mixes or not entries:
            for sequence, count in self._admission.admit(step, budget, alone=not entries):
                if count:
                    batch.compute(step, entries, sequence, count)

    # ------------------------------------------------------------------ blocks and preemption

    def _has_blocks(self, step: Step, entries: list[ScheduledSequence], sequence: Sequence) -> bool:
        """Whether a running sequence has the blocks of its known tokens, or gets them now.

        Those of a prompt were taken when it was admitted; those of forced tokens are not.
        """
        if sequence.status is not Status.RUNNING:
            return False
        capacity = len(sequence.block_ids) * self.config.block_size
        return capacity >= sequence.num_tokens or self._grow(step, entries, sequence)

    def _grow(self, step: Step, entries: list[ScheduledSequence], sequence: Sequence) -> bool:
        """Take the blocks that its known tokens lack, by preemption if necessary.

        Returns False if the sequence itself was preempted. Decodes ask in order of priority, so
        all of a lower priority are still to be scheduled in this step and may be preempted.
        """
        batch, cache = self.batch, self.batch.cache
        lacking = cache.blocks_for(sequence.num_tokens) - len(sequence.block_ids)
        while batch.pool.num_available < lacking:
            scheduled = {id(entry.sequence) for entry in entries}
            victim = next(s for s in reversed(batch.running) if id(s) not in scheduled)
            batch.preempt(victim)
            if victim is sequence:
                return False
        start = len(sequence.block_ids)
        taken = cache.grow(sequence, sequence.num_tokens)
        step.appended.append(BlockAppend(sequence.row, start, taken))
        return True

    # ------------------------------------------------------------------ measurements

    @property
    def oldest_ns(self) -> int:
        """Arrival of the longest waiting sequence, or 0 if none waits."""
        oldest = self.batch.waiting.oldest()
        return 0 if oldest is None else oldest.arrival_ns

    def join_reason(self, step: Step) -> str:
        """Why requests join a running batch in a step just scheduled; empty if none does."""
        joins = 0 < len(step.new) < len(self.batch.running)
        return self._policy.join_reason if joins else ""

    def load(self) -> EngineLoad:
        """The gauges and totals; may be called from any thread."""
        batch, resources = self.batch, self.batch.resources
        states = None if resources.states is None else resources.states.pool
        images = None if resources.images is None else resources.images.cache
        return EngineLoad(
            queued=len(batch.waiting),
            running=len(batch.running),
            used_blocks=batch.pool.num_used,
            preemptions=batch.preemptions,
            reused_tokens=resources.reused_tokens,
            prompt_tokens=resources.prompt_tokens,
            cached_blocks=batch.pool.num_cached,
            steps=resources.steps,
            context_tokens=resources.context_tokens,
            drafted_tokens=resources.drafted_tokens,
            accepted_tokens=resources.accepted_tokens,
            used_state_slots=0 if states is None else states.num_used,
            cached_states=0 if states is None else states.num_cached,
            encoded_images=0 if images is None else images.encoded_images,
            reused_images=0 if images is None else images.reused_images,
        )

    def stats(self, step: Step) -> StepStats:
        """The statistics of a step just scheduled."""
        load, config = self.load(), self.config
        return {
            "Timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
            "Iteration Counter": load.steps,
            "Active Request Count": load.queued + load.running,
            "Max Request Count": config.max_batch_size,
            "Max KV cache blocks": config.num_blocks,
            "Free KV cache blocks": config.num_blocks - load.used_blocks,
            "Used KV cache blocks": load.used_blocks,
            "Tokens per KV cache block": config.block_size,
            "Scheduled Requests": len(step.rows),
            "Context Requests": len(step.rows) - step.num_decodes,
            "Generation Requests": step.num_decodes,
            "Total Context Tokens": step.num_prefill_tokens,
            "Draft Tokens": step.num_drafts,
            "MicroBatch ID": step.step_id % config.pipeline_parallel_size,
            "Cached KV cache blocks": load.cached_blocks,
            "Reused prompt tokens": load.reused_tokens,
            "Total prompt tokens": load.prompt_tokens,
            "Preemptions": load.preemptions,
            "Used state slots": load.used_state_slots,
            "Cached states": load.cached_states,
            "Encoded images": load.encoded_images,
            "Reused images": load.reused_images,
        }


def _ask(speculator: Speculator, entries: list[ScheduledSequence]) -> list[int]:
    """The drafts that the worker is to propose after each entry; empty if it need not follow."""
    asked = [e.sequence for e in entries if e.sampled and _takes_drafts(e.sequence)]
    counts = speculator.ask(asked)
    if counts is None:
        return []
    found = dict(zip(map(id, asked), counts, strict=True))
    return [found.get(id(entry.sequence), 0) if entry.sampled else 0 for entry in entries]


def _decodes_next(sequence: Sequence) -> bool:
    """Whether the next step computes one token of a running sequence, which may be in flight."""
    return sequence.decodes and sequence.num_tokens < sequence.max_tokens


def _may_draft(sequence: Sequence) -> bool:
    """Whether a running sequence has one token to compute, and may continue after the next ones."""
    return (
        sequence.decodes
        and not (sequence.placeholders or sequence.stale_results or sequence.num_drafts)
        and _takes_drafts(sequence)
    )


def _takes_drafts(sequence: Sequence) -> bool:
    """Whether a draft after its known tokens could be of use."""
    request = sequence.request
    # Processors are called once for each token, with the ones before it.
    alone = request.logits_processors or request.return_generation_logits
    return sequence.num_tokens + 1 < sequence.max_tokens and not alone
