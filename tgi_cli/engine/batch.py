"""Sequences with their rows, KV blocks and adapter slots, and the results of their steps.

A policy (:mod:`tgi_cli.engine.scheduler`, :mod:`tgi_cli.engine.external_steps`) decides which
sequences run and how many of their tokens a step computes. Its :class:`Batch` does the rest:
it holds the sequences (:mod:`tgi_cli.engine.live_sequences`), fills steps, and applies results. The
batches of one worker share its :class:`~tgi_cli.engine.resources.Resources`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tgi_cli.engine.forced_tokens import failure, follow
from tgi_cli.engine.live_sequences import LiveSequences
from tgi_cli.engine.messages import Finished, FinishReason, Logits, StepOutputs, VerifiedDrafts
from tgi_cli.engine.prompt_reports import report_prompt
from tgi_cli.engine.resources import Resources
from tgi_cli.engine.sequence import ScheduledSequence, Sequence, Status
from tgi_cli.engine.speculator import Speculator
from tgi_cli.engine.step import GrammarCompiler, Step, StepResult, TokenAppend


class _StepInFlight(NamedTuple):
    """A step whose result is awaited: its entries, and the keys of images that it encodes."""

    entries: list[ScheduledSequence]
    encodes: list[int]


class Batch(LiveSequences):
    """The sequences of one policy, and the steps that compute them.

    Args:
        resources: shared with the other batches of the worker.
        compiler: compiles grammars, or None to refuse requests that have one.
        speculator: learns which of its drafts were accepted; None without speculative decoding.
    """

    def __init__(
        self,
        resources: Resources,
        compiler: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        super().__init__(resources, compiler, speculator)
        self._in_flight: deque[_StepInFlight] = deque()
        self._in_stages = self.config.pipeline_parallel_size > 1

    def begin_prefills(self, budget: int, waits: bool) -> int:
        """Prepare to plan the prompts of a step.

        Args:
            budget: prompt tokens that the step may compute.
            waits: whether streams wait for the step.

        Returns:
            The budget, reduced where that many tokens would take too long.
        """
        if waits:
            budget = self.resources.pace.prefill_tokens(budget)
        if self.resources.images is not None:
            texts = not waits and any(
                sequence.num_computed < sequence.num_tokens and not sequence.images_end
                for sequence in self.live.values()
            )
            self.resources.images.begin(budget, waits, texts)
        return budget

    def plan(
        self, step: Step, sequence: Sequence, budget: int, target: int | None = None
    ) -> tuple[int, int]:
        """How many tokens of a running sequence a step computes next, and the budget that remains.

        The step may also be given a part of an image to encode.

        Args:
            step: being scheduled.
            sequence: has tokens to be computed.
            budget: prompt tokens that the step may still compute.
            target: position to compute it up to; None for all known tokens.
        """
        start = sequence.num_computed
        most = sequence.num_tokens if target is None else target
        if start >= sequence.images_end:
            count = sequence.next_chunk(max(0, min(most - start, budget)))
            return count, budget - count
        assert self.resources.images is not None
        goal = start + sequence.next_chunk(max(0, most - start))
        return self.resources.images.plan(step, sequence, budget, goal)

    def compute(
        self,
        step: Step,
        entries: list[ScheduledSequence],
        sequence: Sequence,
        count: int,
        drafts: list[int] | None = None,
    ) -> None:
        """Have ``step`` compute the next ``count`` known tokens of a running sequence.

        With ``drafts``, these are all its known tokens, and the step also verifies the drafts.
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
        images = []
        if start < sequence.images_end and self.resources.images is not None:
            images = self.resources.images.spans(sequence, len(step.rows), start, end)
            step.images += images
        step.rows.append(sequence.row)
        step.starts.append(start)
        step.counts.append(count + len(drafts))
        step.samples.append(sampled)
        step.reads_logits |= sampled > 0 and sequence.reads_logits
        if self._in_stages:
            step.first_tokens.append(sequence.token_ids[start])
        entry = ScheduledSequence(sequence, sequence.attempt, start, end, sampled, drafts=drafts)
        if images:
            entry.image_keys = frozenset(image.key for image in images)
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
        if resources.images is not None:
            resources.images.commit(step)
        if resources.host is not None:
            resources.host.commit(step)
        resources.steps += 1
        resources.context_tokens += step.num_prefill_tokens
        resources.drafted_tokens += step.num_drafts
        self.grammars.begin_step(entries)
        self._in_flight.append(_StepInFlight(entries, [each.key for each in step.encodes]))

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest step in flight; returns its outputs for clients."""
        outputs = StepOutputs()
        entries = self._in_flight.popleft().entries
        if self.resources.images is not None:
            self.resources.images.learn(result.encodes)
        if result.encodes.failed:
            outputs.finished += self._fail_images(entries, result.encodes.failed)
        end = 0
        for index, entry in enumerate(entries):
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
                    self._append_after(sequence, result, sample, accepted, outputs)
                if self.speculator is not None and index in result.proposals:
                    known = len(sequence.token_ids) == entry.end + 1 + accepted
                    if known and sequence.first_unsent < 0 and entry.is_current:
                        self.speculator.proposed(sequence, result.proposals[index])
        return outputs

    def _verify(
        self, entry: ScheduledSequence, result: StepResult, first: int, outputs: StepOutputs
    ) -> int:
        """How many drafts of an entry, whose choices begin at ``first``, are accepted.

        A draft is accepted if it is the token chosen for its position and all before it are, too.
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
        drafted, source = len(entry.drafts), sequence.draft_source
        outputs.drafts.append(
            VerifiedDrafts(sequence.request.request_id, drafted, accepted, source)
        )
        if self.speculator is not None:
            self.speculator.learn(sequence, entry.drafts, accepted)
        return accepted

    def _append_after(
        self,
        sequence: Sequence,
        result: StepResult,
        first: int,
        accepted: int,
        outputs: StepOutputs,
    ) -> None:
        """Append the token chosen after each accepted draft, the last chosen one included.

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

    def timed(self, step: Step, result: StepResult, seconds: float) -> None:
        """Learn how long streams have waited for a step; see ``StageTimer.end``."""
        self.resources.pace.learn(step, seconds, result.encodes.seconds)
        if self.speculator is not None:
            self.speculator.timed(step, seconds)

    def fail(self, cause: str) -> StepOutputs:
        """End the requests of the oldest step in flight, which failed; all others continue."""
        outputs = StepOutputs()
        step = self._in_flight.popleft()
        outputs.finished += self._fail_images((), dict.fromkeys(step.encodes, cause))
        for entry in step.entries:
            sequence = entry.sequence
            self._drop_snapshot(entry)
            if sequence.status is not Status.FINISHED and sequence.attempt == entry.attempt:
                outputs.finished.append(self.finish(sequence, FinishReason.ERROR, cause))
        return outputs

    def _fail_images(
        self, entries: Iterable[ScheduledSequence], failed: Mapping[int, str]
    ) -> list[Finished]:
        """End the sequences of images that could not be encoded, given with the causes.

        These are the sequences that wait for such an image, and those whose entries have used it.
        """
        if self.resources.images is None:
            return []
        for key, cause in failed.items():
            self.resources.images.cache.fail(key, cause)
        ended = []
        for entry in entries:
            causes = [failed[key] for key in entry.image_keys if key in failed]
            if causes and entry.is_current:
                ended += self.end_with_forks(entry.sequence, causes[0])
        return ended + self.end_failed_images()

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
