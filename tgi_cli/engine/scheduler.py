"""Decides what each step computes. Pure bookkeeping over numbers.

One rule: *computed tokens chase known tokens under a token budget*. A sequence with one token
to go is a decode, one with more is a prefill chunk; fresh, cached, chunked and resumed
sequences need no other case. Decodes come first, prefill chunks share what is left of
``max_batch_prefill_tokens`` (continuous batching: Yu et al. 2022, Orca; chunked prefill:
Agrawal et al. 2024, Sarathi-Serve). ``--batching`` may keep the two apart.

By default blocks are over-committed: a sequence takes them as it grows, and when they run out
the last in rank is preempted, its blocks released, and it resumes by recomputation. The first
in rank is never preempted, and one sequence always fits the pool, so there is always progress.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from tgi_cli.engine.admission import AdmissionPolicy
from tgi_cli.engine.batching_policy import batching_policy_of
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.grammar import Grammars, failure
from tgi_cli.engine.kv_cache import KVCache
from tgi_cli.engine.lora_slots import LoraSlots
from tgi_cli.engine.messages import (
    Finished,
    FinishReason,
    GenerationRequest,
    Logits,
    StepOutputs,
)
from tgi_cli.engine.metrics import EngineLoad, StepStats
from tgi_cli.engine.optional_outputs import report_context
from tgi_cli.engine.sequence import ScheduledSequence, Sequence, Status
from tgi_cli.engine.step import (
    AdapterStore,
    BlockAppend,
    GrammarCompiler,
    Step,
    StepResult,
    TokenAppend,
)
from tgi_cli.engine.validation import validate_request
from tgi_cli.engine.waiting_queue import WaitingQueue


class Scheduler:
    """Admits, runs, preempts and finishes sequences.

    Call :meth:`schedule` for a step, run it, and give its result to :meth:`update`, in order;
    up to two steps may be in flight, since no token's value is needed to schedule the next.

    Args:
        limits: what a step and a request may not exceed.
        store: holds adapters; None where the limits give them no slots.
        grammars: compiles them; None: no request may have one.
        beside: another scheduler over the same worker, whose blocks, adapters and rows this one
            shares; their steps alternate, and none of either is in flight when the other acts.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        store: AdapterStore | None = None,
        grammars: GrammarCompiler | None = None,
        beside: Scheduler | None = None,
    ) -> None:
        self.limits = limits
        self.cache: KVCache = KVCache(limits) if beside is None else beside.cache
        self.pool = self.cache.pool
        self.adapters: LoraSlots = LoraSlots(limits, store) if beside is None else beside.adapters
        self.grammars = Grammars(grammars)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by rank
        self.preemptions = 0
        self._live: dict[int, Sequence] = {}
        self._rule = batching_policy_of(limits)
        self._admission = AdmissionPolicy(
            limits, self.cache, self.adapters, self.waiting, self._live, self._rule
        )
        self._freed: list[int] = []
        if beside is not None:
            self._admission, self._freed = beside._admission, beside._freed
        self._in_flight: deque[list[ScheduledSequence]] = deque()
        self._step_id = 0
        self._context_tokens = 0
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    def add(self, request: GenerationRequest) -> Finished | None:
        """Queue a request; one that can never run is answered at once with its error.

        So is one whose id is live already: the answer then carries that id, and who submits
        from several places keeps ids apart (the wire's server does).
        """
        refusal = validate_request(
            request, self.limits, self._live, self.waiting, self.adapters, self.grammars
        )
        if refusal is not None:
            return refusal
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals)
        self._live[request.request_id] = sequence
        self.waiting.push(sequence)
        self.adapters.joined(request.adapter_id)
        self.grammars.joined(sequence)
        if request.timeout_seconds is not None:
            deadline = sequence.arrival_ns + int(request.timeout_seconds * 1e9)
            heapq.heappush(self._deadlines, (deadline, self._arrivals, sequence))
        return None

    def expire(self) -> list[Finished]:
        """End the requests whose time is up."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= time.monotonic_ns():
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.status is not Status.FINISHED:
                cause = f"not done within {sequence.request.timeout_seconds:g} s"
                ended.append(self._finish(sequence, FinishReason.TIMEOUT, cause))
        return ended

    def collect_adapters(self) -> list[Finished]:
        """Take in the adapters that were read; the requests of those that failed end."""
        return self.fail_adapters(self.adapters.collect() if self.adapters.reading else ())

    def fail_adapters(self, failed: Iterable[tuple[int, str]]) -> list[Finished]:
        """End the requests of adapters that could not be read."""
        ended = []
        for adapter_id, error in failed:
            for sequence in [s for s in self._live.values() if s.request.adapter_id == adapter_id]:
                ended.append(self._finish(sequence, FinishReason.ERROR, error))
        return ended

    def collect_grammars(self) -> list[Finished]:
        """Take in the grammars that were compiled; the requests of those that failed end."""
        failed = self.grammars.collect() if self.grammars.compiling else ()
        return [self._finish(sequence, FinishReason.GRAMMAR, error) for sequence, error in failed]

    def cancel(self, request_id: int) -> Finished | None:
        """End a live request now; its row and blocks are free for the next step."""
        sequence = self._live.get(request_id)
        return None if sequence is None else self._finish(sequence, FinishReason.CANCELLED)

    def cancel_all(self) -> list[Finished]:
        """End every live request."""
        return [self._finish(s, FinishReason.CANCELLED) for s in list(self._live.values())]

    def fail_all(self, cause: str) -> list[Finished]:
        """End every live request because of ``cause``."""
        return [self._finish(s, FinishReason.ERROR, cause) for s in list(self._live.values())]

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can be computed now.

        Cost at 1 / 32 / 256 decoding sequences, with update(): 4 / 43 / 320 us on one
        2025 server core.
        """
        step = Step(self._step_id)
        entries: list[ScheduledSequence] = []
        if self._rule.mixes:
            self._schedule_decodes(step, entries)
            step.num_decodes = len(entries)
            self._schedule_prefills(step, entries)
        else:
            self._schedule_prefills(step, entries)
            if not entries:
                self._schedule_decodes(step, entries)
                step.num_decodes = len(entries)
        if not entries:
            return None
        if self._freed:
            step.freed = self._freed.copy()
            self._freed.clear()
        self.grammars.begin(entries)
        self._step_id += 1
        self._context_tokens += step.num_tokens - step.num_decodes
        self._in_flight.append(entries)
        return step

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest step in flight; returns what clients get to see."""
        outputs = StepOutputs()
        index = -1
        for place, entry in enumerate(self._in_flight.popleft()):
            index += entry.sampled
            sequence = entry.sequence
            if sequence.status is not Status.RUNNING or sequence.attempt != entry.attempt:
                continue  # ended or preempted meanwhile: the result is stale
            chosen = entry.sampled
            if chosen and sequence.stale_results:
                sequence.stale_results -= 1
                chosen = False
            error = result.errors.get(index) if chosen else None
            if error is not None:
                outputs.finished.append(self._finish(sequence, *failure(sequence, error)))
                continue
            self.cache.index_computed(sequence, entry.end)
            self.cache.free_out_of_window(sequence, entry.end)
            if result.prompt_logprobs or result.context_logits:
                report_context(sequence, place, entry.start, result, outputs)
            if chosen:
                if index in result.generation_logits:
                    values = result.generation_logits[index][None]
                    outputs.logits.append(
                        Logits(sequence.request.request_id, entry.end - 1, values)
                    )
                self._append_token(sequence, result, index, outputs)
        self.describe(outputs)
        return outputs

    def fail(self, cause: str) -> StepOutputs:
        """The oldest step in flight broke: its requests end with ``cause``, all others go on."""
        outputs = StepOutputs()
        for entry in self._in_flight.popleft():
            sequence = entry.sequence
            if sequence.status is not Status.FINISHED and sequence.attempt == entry.attempt:
                outputs.finished.append(self._finish(sequence, FinishReason.ERROR, cause))
        self.describe(outputs)
        return outputs

    # ------------------------------------------------------------------ one step, in its order

    def _schedule_decodes(self, step: Step, entries: list[ScheduledSequence]) -> None:
        """Every running sequence that has one token to go."""
        block_size = self.limits.block_size
        for sequence in list(self.running):
            if sequence.num_tokens - sequence.num_computed != 1:
                if sequence.first_unsent >= 0:
                    self._has_blocks(step, entries, sequence)  # in order of rank, here as well
                continue
            if sequence.status is not Status.RUNNING or self._is_complete(sequence):
                continue
            full = sequence.num_computed == len(sequence.block_ids) * block_size
            if not full or self._grow(step, entries, sequence):
                self._compute(step, entries, sequence, 1)
        self._rule.decoded()

    def _schedule_prefills(self, step: Step, entries: list[ScheduledSequence]) -> None:
        """Chunks of prompts under way, then of those that are let in."""
        most = self.limits.max_batch_prefill_tokens
        # Many decodes must not starve prefills: a quarter of the budget is always theirs.
        budget = max(most - len(entries), max(1, most // 4))
        for sequence in list(self.running):
            pending = sequence.num_tokens - sequence.num_computed
            if budget > 0 and pending > 1 and self._has_blocks(step, entries, sequence):
                count = min(pending, budget)
                self._compute(step, entries, sequence, count)
                budget -= count
        if self._rule.mixes or not entries:
            alone = not entries
            for sequence, count in self._admission.admit(step, budget, self.running, alone):
                insort(self.running, sequence, key=attrgetter("rank"))
                if count:
                    self._compute(step, entries, sequence, count)

    def _compute(
        self, step: Step, entries: list[ScheduledSequence], sequence: Sequence, count: int
    ) -> None:
        start = sequence.num_computed
        end = start + count
        if sequence.first_unsent >= 0:
            given = sequence.token_ids[sequence.first_unsent :]
            step.forced_tokens.append(TokenAppend(sequence.row, sequence.first_unsent, given))
            sequence.first_unsent = -1
        sampled = end == sequence.num_tokens
        if start < sequence.prompt_tokens <= end:
            sequence.prompt_step = step.step_id
        step.rows.append(sequence.row)
        step.starts.append(start)
        step.counts.append(count)
        step.samples.append(sampled)
        entries.append(ScheduledSequence(sequence, sequence.attempt, start, end, sampled))
        sequence.num_computed = end
        sequence.placeholders += sampled

    # ------------------------------------------------------------------ blocks and preemption

    def _has_blocks(self, step: Step, entries: list[ScheduledSequence], sequence: Sequence) -> bool:
        """Whether a running sequence holds the blocks of its known tokens, or gets them now.

        Those of a prompt were taken when it was admitted; tokens that a grammar gave come later.
        """
        if sequence.status is not Status.RUNNING:
            return False
        held = len(sequence.block_ids) * self.limits.block_size
        return held >= sequence.num_tokens or self._grow(step, entries, sequence)

    def _grow(self, step: Step, entries: list[ScheduledSequence], sequence: Sequence) -> bool:
        """Take the blocks that its known tokens lack, preempting the last in rank if need be.

        False when that was the sequence itself. Decodes ask in order of rank, so that all that
        rank lower are still to be scheduled in this step and may be preempted.
        """
        lacking = self.cache.blocks_for(sequence.num_tokens) - len(sequence.block_ids)
        while self.pool.num_available < lacking:
            scheduled = {id(entry.sequence) for entry in entries}
            victim = next(s for s in reversed(self.running) if id(s) not in scheduled)
            self._preempt(victim)
            if victim is sequence:
                return False
        start = len(sequence.block_ids)
        taken = self.cache.grow(sequence, sequence.num_tokens)
        step.appended.append(BlockAppend(sequence.row, start, taken))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave_row(sequence)
        sequence.rewind()
        self.waiting.push(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._freed.append(sequence.row)
        self._admission.free_rows.append(sequence.row)
        self.cache.release(sequence)
        self.adapters.leave(sequence.request.adapter_id)

    # ------------------------------------------------------------------ results

    def _is_complete(self, sequence: Sequence) -> bool:
        """Whether the steps in flight already choose its last token."""
        return sequence.num_tokens >= sequence.max_tokens

    def _append_token(
        self, sequence: Sequence, result: StepResult, index: int, outputs: StepOutputs
    ) -> None:
        token = result.token_ids[index]
        sequence.token_ids.append(token)
        sequence.placeholders -= 1
        outputs.request_ids.append(sequence.request.request_id)
        outputs.token_ids.append(token)
        outputs.logprobs.append(result.logprobs[index])
        outputs.top_ids.append(result.top_ids[index])
        outputs.top_logprobs.append(result.top_logprobs[index])
        if token in sequence.stop_ids:
            outputs.finished.append(self._finish(sequence, FinishReason.EOS_TOKEN))
        elif sequence.matcher is not None:
            reason, error = self.grammars.follow(sequence, token, outputs)
            if reason is not None:
                outputs.finished.append(self._finish(sequence, reason, error))
        elif len(sequence.token_ids) >= sequence.max_tokens:
            outputs.finished.append(self._finish(sequence, FinishReason.LENGTH))

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> Finished:
        if sequence.status is Status.RUNNING:
            self._leave_row(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self.adapters.ended(sequence.request.adapter_id)
        self.grammars.ended(sequence)
        del self._live[sequence.request.request_id]
        return Finished(sequence.request.request_id, reason, error)

    # ------------------------------------------------------------------ measurements

    @property
    def oldest_ns(self) -> int:
        """Arrival of the longest waiting sequence, or 0 if none waits."""
        oldest = self.waiting.oldest()
        return 0 if oldest is None else oldest.arrival_ns

    def join_reason(self, step: Step) -> str:
        """Why requests join a running batch in a step just scheduled; empty if none does."""
        return self._rule.reason if 0 < len(step.new) < len(self.running) else ""

    def load(self) -> EngineLoad:
        """The gauges and totals; may be called from any thread."""
        return EngineLoad(
            queued=len(self.waiting),
            running=len(self.running),
            used_blocks=self.pool.num_used,
            preemptions=self.preemptions,
            reused_tokens=self._admission.reused_tokens,
            prompt_tokens=self._admission.prompt_tokens,
            cached_blocks=self.pool.num_cached,
            steps=self._step_id,
            context_tokens=self._context_tokens,
        )

    def stats(self, step: Step) -> StepStats:
        """A step just scheduled."""
        return StepStats(
            timestamp=time.time(),
            load=self.load(),
            context_requests=len(step.rows) - step.num_decodes,
            generation_requests=step.num_decodes,
            context_tokens=step.num_tokens - step.num_decodes,
            max_requests=self.limits.max_batch_size,
            max_blocks=self.pool.num_blocks,
            tokens_per_block=self.limits.block_size,
        )

    def describe(self, outputs: StepOutputs) -> None:
        outputs.started = self._admission.take_started()
        outputs.adapters = self.adapters.take_answers()
