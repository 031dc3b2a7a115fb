"""Sequences on the worker's rows, KV blocks and adapter slots, and what steps give them.

A policy (:mod:`tgi_cli.engine.scheduler`, :mod:`tgi_cli.engine.external_steps`) decides which
sequences run and how many of their tokens a step computes. Its :class:`Batch` does the rest:
it holds the sequences from :meth:`Batch.add` to :meth:`Batch.finish`, gives them rows, and applies
results. The batches of one worker share its :class:`~tgi_cli.engine.resources.Resources`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from tgi_cli.engine.forced_tokens import failure, follow
from tgi_cli.engine.grammar import Grammars
from tgi_cli.engine.messages import (
    Finished,
    FinishReason,
    GenerationRequest,
    Logits,
    StepOutputs,
    VerifiedDrafts,
)
from tgi_cli.engine.prompt_reports import report_prompt
from tgi_cli.engine.resources import Resources
from tgi_cli.engine.sequence import ScheduledSequence, Sequence, Status, by_priority
from tgi_cli.engine.speculator import Speculator
from tgi_cli.engine.step import (
    GrammarCompiler,
    NewRow,
    OptionalOutputs,
    Step,
    StepResult,
    TokenAppend,
)
from tgi_cli.engine.validation import validate_for_decoder, validate_length
from tgi_cli.engine.waiting_queue import WaitingQueue


class Batch:
    """The sequences of one policy.

    Args:
        resources: shared with the other batches of the worker.
        compiler: compiles grammars, or None to refuse requests that have one.
        speculator: learns which of its drafts were accepted; None without speculative decoding.

    Attributes:
        live: sequences that wait or run, by request id.
        waiting: sequences without a row.
        running: sequences with a row, in order of priority.
        preemptions: total.
    """

    def __init__(
        self,
        resources: Resources,
        compiler: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.resources = resources
        self.speculator = speculator
        self.config = resources.config
        self.cache = resources.cache
        self.pool = resources.pool
        self.adapters = resources.adapters
        self.grammars = Grammars(compiler)
        self.live: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._in_flight: deque[list[ScheduledSequence]] = deque()
        self._arrivals = 0

    # ------------------------------------------------------------------ requests

    def validate(self, request: GenerationRequest) -> None:
        """Check that a request can run some day. Raises ValueError."""
        if request.request_id in self.live:
            raise ValueError(f"request id {request.request_id} is in use")
        decoder = self.config.decoder
        length = len(request.prompt_ids) + (decoder is not None)
        validate_length(length, request.max_new_tokens, self.config)
        if decoder is not None:
            validate_for_decoder(request, decoder)
        elif request.first_id is not None:
            raise ValueError("only answers of encoder-decoder models begin with a given token")
        parent = None if request.fork_of is None else self.live.get(request.fork_of)
        if parent is not None:
            source = parent.request
            if (source.prompt_ids, source.cache_salt) != (request.prompt_ids, request.cache_salt):
                raise ValueError(f"fork_of {request.fork_of} is a request of another prompt")
            if source.adapter_id != request.adapter_id:
                raise ValueError(f"fork_of {request.fork_of} is a request of another adapter")
        if request.thinking is not None and request.return_generation_logits:
            raise ValueError("forced tokens have no logits, so a thinking budget excludes them")
        self.adapters.validate(request)
        self.grammars.validate(request)

    def add(self, request: GenerationRequest) -> Sequence:
        """Let a valid request wait, while its adapter is read and its grammar compiled."""
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, self.config.decoder)
        self.live[request.request_id] = sequence
        if request.fork_of is not None:
            sequence.parent = parent = self.live.get(request.fork_of)
            if parent is not None:
                parent.num_forks += 1
        self.waiting.push(sequence)
        self.adapters.add_request(request.adapter_id)
        self.grammars.add(sequence)
        return sequence

    def cancel(self, request_id: int) -> Finished | None:
        """End a live request now; its row and blocks are free for the next step."""
        sequence = self.live.get(request_id)
        return None if sequence is None else self.finish(sequence, FinishReason.CANCELLED)

    def finish_all(self, reason: FinishReason, error: str = "") -> list[Finished]:
        """End every live request."""
        return [self.finish(sequence, reason, error) for sequence in list(self.live.values())]

    def fail_adapters(self, failed: Iterable[tuple[int, str]]) -> list[Finished]:
        """End the requests of adapters that could not be read, given with the causes."""
        return [
            self.finish(sequence, FinishReason.ERROR, error)
            for adapter_id, error in failed
            for sequence in list(self.live.values())
            if sequence.request.adapter_id == adapter_id
        ]

    def collect_grammars(self) -> list[Finished]:
        """Take the grammars that have been compiled; end the requests of those that failed."""
        failed = self.grammars.collect() if self.grammars.compiling else ()
        return [self.finish(sequence, FinishReason.GRAMMAR, error) for sequence, error in failed]

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> Finished:
        """End a live sequence."""
        if sequence.status is Status.RUNNING:
            self._leave_row(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self.adapters.remove_request(sequence.request.adapter_id)
        self.grammars.remove(sequence)
        if self.speculator is not None:
            self.speculator.finish(sequence)
        self._leave_parent(sequence)
        del self.live[sequence.request.request_id]
        return Finished(sequence.request.request_id, reason, error)

    def _leave_parent(self, sequence: Sequence) -> None:
        """A fork has started or ended."""
        parent, sequence.parent = sequence.parent, None
        if parent is not None:
            parent.num_forks -= 1
            if not parent.num_forks and self.resources.states is not None:
                self.resources.states.release_prompt(parent)

    # ------------------------------------------------------------------ rows

    def run(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence, which has its blocks, a row in ``step``.

        Returns:
            Whether this is its first row; False when it resumes after preemption.
        """
        request, resources = sequence.request, self.resources
        self.waiting.admit(sequence)
        insort(self.running, sequence, key=by_priority)
        sequence.row = resources.free_rows.pop()
        sequence.status = Status.RUNNING
        if resources.states is not None:
            resources.states.attach(sequence)
        step.new.append(
            NewRow(
                row=sequence.row,
                request_id=request.request_id,
                token_ids=list(sequence.token_ids),
                prompt_tokens=sequence.prompt_tokens,
                block_ids=list(sequence.block_ids),
                sampling=request.sampling,
                extras=OptionalOutputs.of(request),
                adapter_slot=self.adapters.acquire(request.adapter_id, step),
            )
        )
        if sequence.started:
            return False
        sequence.started = True
        self._leave_parent(sequence)
        resources.reused_tokens += sequence.num_computed
        resources.prompt_tokens += sequence.prompt_tokens
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take row and blocks from a running sequence; it will be recomputed."""
        self.preemptions += 1
        self._leave_row(sequence)
        sequence.rewind()
        self.waiting.push(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.resources.freed_rows.append(sequence.row)
        self.resources.free_rows.append(sequence.row)
        self.cache.release(sequence)
        self.adapters.release(sequence.request.adapter_id)

    # ------------------------------------------------------------------ steps

    def compute(
        self,
        step: Step,
        entries: list[ScheduledSequence],
        sequence: Sequence,
        count: int,
        drafts: list[int] | None = None,
    ) -> None:
        """Have ``step`` compute the next ``count`` known tokens of a running sequence.

        With ``drafts``, these are all its known tokens, and the step verifies the drafts, too.
        """
        start = sequence.num_computed
        end = start + count
        if sequence.first_unsent >= 0:
            forced = sequence.token_ids[sequence.first_unsent :]
            step.forced_tokens.append(TokenAppend(sequence.row, sequence.first_unsent, forced))
            sequence.first_unsent = -1
        drafts = drafts or []
        sampled = 1 + len(drafts) if end == sequence.num_tokens else 0
        if drafts:
            step.drafts.append(TokenAppend(sequence.row, end, drafts))
            sequence.num_drafts = len(drafts)
        if start < sequence.prompt_tokens <= end:
            sequence.prompt_step = step.step_id
        step.rows.append(sequence.row)
        step.starts.append(start)
        step.counts.append(count + len(drafts))
        step.samples.append(sampled)
        entry = ScheduledSequence(sequence, sequence.attempt, start, end, sampled, drafts=drafts)
        if self.resources.states is not None:
            entry.snapshot = self.resources.states.compute(step, sequence, start, end)
        entries.append(entry)
        sequence.num_computed = end
        sequence.placeholders += sampled > 0

    def commit(self, step: Step, entries: list[ScheduledSequence]) -> None:
        """Take a complete step as the next one to be launched."""
        resources = self.resources
        if resources.freed_rows:
            step.freed, resources.freed_rows = resources.freed_rows, []
        if resources.states is not None:
            resources.states.commit()
        resources.steps += 1
        resources.context_tokens += step.num_prefill_tokens
        resources.drafted_tokens += step.num_drafts
        self.grammars.begin_step(entries)
        self._in_flight.append(entries)

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest step in flight; returns its outputs for clients."""
        outputs = StepOutputs()
        end = 0
        for index, entry in enumerate(self._in_flight.popleft()):
            sample, end = end, end + entry.sampled
            sequence = entry.sequence
            if sequence.status is not Status.RUNNING or sequence.attempt != entry.attempt:
                self._drop_snapshot(entry)
                continue  # ended or preempted meanwhile: the result is stale
            sampled = entry.sampled > 0
            if sampled and sequence.stale_results:
                sequence.stale_results -= 1
                sampled = False
            error = result.errors.get(sample) if sampled else None
            if error is not None:
                self._drop_snapshot(entry)
                outputs.finished.append(self.finish(sequence, *failure(sequence, error)))
                continue
            self.cache.index_computed(sequence, entry.end)
            if entry.snapshot is not None and self.resources.states is not None:
                self.resources.states.keep(sequence, entry.snapshot)
            self.cache.free_out_of_window(sequence, entry.end)
            if result.prompt_logprobs or result.context_logits:
                report_prompt(sequence, index, entry.start, result, outputs)
            if sampled:
                if sample in result.generation_logits:
                    values = result.generation_logits[sample][None]
                    outputs.logits.append(
                        Logits(sequence.request.request_id, entry.end - 1, values)
                    )
                sequence.placeholders -= 1
                accepted = self._verify(entry, result, sample, outputs) if entry.drafts else 0
                self._append_token(sequence, result, sample, outputs)
                if accepted:
                    self._append_behind(sequence, result, sample, accepted, outputs)
                if self.speculator is not None and index in result.proposals:
                    known = len(sequence.token_ids) == entry.end + 1 + accepted
                    if known and sequence.first_unsent < 0 and entry.is_current:
                        self.speculator.proposed(sequence, result.proposals[index])
        return outputs

    def _verify(
        self, entry: ScheduledSequence, result: StepResult, first: int, outputs: StepOutputs
    ) -> int:
        """How many drafts of an entry, whose choices begin at ``first``, are accepted.

        A draft is if it is the token that was chosen for its position, and those before it are.
        """
        sequence, accepted = entry.sequence, 0
        for draft, token in zip(entry.drafts, result.token_ids[first:], strict=False):
            if draft != token:
                break
            accepted += 1
            if token in sequence.stop_ids:
                break
        sequence.num_drafts = 0
        self.resources.accepted_tokens += accepted
        drafted, predicted = len(entry.drafts), sequence.drafts_predicted
        outputs.drafts.append(
            VerifiedDrafts(sequence.request.request_id, drafted, accepted, predicted)
        )
        if self.speculator is not None:
            self.speculator.learn(sequence, entry.drafts, accepted)
        return accepted

    def _append_behind(
        self,
        sequence: Sequence,
        result: StepResult,
        first: int,
        accepted: int,
        outputs: StepOutputs,
    ) -> None:
        """Append the token chosen behind each accepted draft, the last chosen one included.

        What was computed for the other drafts is overwritten by later steps.
        """
        for sample in range(first + 1, first + 1 + accepted):
            if sequence.status is not Status.RUNNING:
                return
            sequence.num_computed += 1  # the draft, which was appended as the chosen token
            self.cache.index_computed(sequence, sequence.num_computed)
            self.cache.free_out_of_window(sequence, sequence.num_computed)
            if sequence.first_unsent >= 0:
                return  # forced tokens follow instead
            error = result.errors.get(sample)
            if error is not None:
                outputs.finished.append(self.finish(sequence, *failure(sequence, error)))
                return
            self._append_token(sequence, result, sample, outputs)

    def fail(self, cause: str) -> StepOutputs:
        """End the requests of the oldest step in flight, which failed; all others go on."""
        outputs = StepOutputs()
        for entry in self._in_flight.popleft():
            sequence = entry.sequence
            self._drop_snapshot(entry)
            if sequence.status is not Status.FINISHED and sequence.attempt == entry.attempt:
                outputs.finished.append(self.finish(sequence, FinishReason.ERROR, cause))
        return outputs

    def _drop_snapshot(self, entry: ScheduledSequence) -> None:
        if entry.snapshot is not None and self.resources.states is not None:
            self.resources.states.drop(entry.snapshot)

    def _append_token(
        self, sequence: Sequence, result: StepResult, sample: int, outputs: StepOutputs
    ) -> None:
        token = result.token_ids[sample]
        sequence.token_ids.append(token)
        outputs.request_ids.append(sequence.request.request_id)
        outputs.token_ids.append(token)
        outputs.logprobs.append(result.logprobs[sample])
        outputs.top_ids.append(result.top_ids[sample])
        outputs.top_logprobs.append(result.top_logprobs[sample])
        if sequence.followed:
            reason, error = follow(sequence, token, outputs, self.grammars.eos_token_ids)
            if reason is not None:
                outputs.finished.append(self.finish(sequence, reason, error))
        elif token in sequence.stop_ids:
            outputs.finished.append(self.finish(sequence, FinishReason.EOS_TOKEN))
        elif len(sequence.token_ids) >= sequence.max_tokens:
            outputs.finished.append(self.finish(sequence, FinishReason.LENGTH))
