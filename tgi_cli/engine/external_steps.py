"""Externally driven steps: over the sequences that a caller names, one step at a time.

The engine's scheduler decides which sequence computes what. Here the sender of an
:class:`~tgi_cli.engine.messages.Advance` does, as text-generation-inference's router does with
its shards; between two of its steps its sequences do not change. Both policies run on the same
device, and only the timing of one depends on the other:

==============  ===============================================================================
shared          how
==============  ===============================================================================
the device      steps alternate; results of the scheduler's steps in flight are awaited first. An
                Advance of more prompt tokens than one step may have becomes several steps
rows, blocks    a sequence has all that it may ever need; see engine/reserved_sequences.py
cached blocks   each finds the prefixes that the other computed
adapters        a slot belongs to its adapter while any sequence runs with it
==============  ===============================================================================
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tgi_cli.engine.batch import Batch
from tgi_cli.engine.grammar import Grammars
from tgi_cli.engine.messages import (
    Advance,
    Advanced,
    AdvanceError,
    AdvanceFault,
    FinishReason,
    StepOutputs,
)
from tgi_cli.engine.reserved_sequences import ReservedSequences
from tgi_cli.engine.sequence import ScheduledSequence, Sequence, Status
from tgi_cli.engine.speculator import Speculator
from tgi_cli.engine.step import GrammarCompiler, Step, StepResult


@dataclass(slots=True, eq=False)
class _Call:
    """An Advance in progress.

    Attributes:
        new: its new sequences, once they are added.
        targets: its sequences, each with the number of tokens up to which it is computed.
        outputs, forward_ns: of its steps so far.
    """

    message: Advance
    new: list[Sequence] = field(default_factory=list)
    targets: list[tuple[Sequence, int]] = field(default_factory=list)
    outputs: list[StepOutputs] = field(default_factory=list)
    forward_ns: int = 0
    added: bool = False


class ExternalStepScheduler:
    """Schedules the steps that callers ask for, on the core loop's thread.

    Args:
        scheduled: the sequences of the scheduler on the same worker.
        compiler: compiles grammars, or None to refuse requests that have one.
        speculator: proposes drafts, by which a step may give a sequence several tokens; None for
            one token a step.

    Attributes:
        batch: the callers' sequences.
        deferred: whether the oldest call waits for what threads read or compile.
    """

    def __init__(
        self,
        scheduled: Batch,
        compiler: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.batch = Batch(scheduled.resources, compiler, speculator)
        self.deferred = False
        self._reserved = ReservedSequences(self.batch, scheduled)
        self._calls: deque[_Call] = deque()
        self._errors: dict[int, str] = {}
        """Causes, by request id, of requests that ended before their first step."""
        self._launched_ns = 0

    # ------------------------------------------------------------------ messages

    @property
    def num_calls(self) -> int:
        """Advances that wait or are in progress; may be read from any thread."""
        return len(self._calls)

    @property
    def num_driven(self) -> int:
        """Sequences that are not idle; may be read from any thread."""
        return self._reserved.num_active

    def advance(self, message: Advance) -> None:
        """Queue a call, which is answered through its future."""
        self._calls.append(_Call(message))

    def drop(self, request_ids: Iterable[int]) -> None:
        """End sequences."""
        for request_id in request_ids:
            self.batch.cancel(request_id)
            self._errors.pop(request_id, None)

    def collect(self, failed: Iterable[tuple[int, str]]) -> None:
        """Take compiled grammars; end the requests of adapters that could not be read."""
        ended = (*self.batch.fail_adapters(failed), *self.batch.collect_grammars())
        for finished in (*ended, *self.batch.end_failed_images()):
            self._errors[finished.request_id] = finished.error
        self.deferred = False

    def park_idle(self) -> None:
        """Free blocks for waiting requests of the scheduler."""
        while self._reserved.park_idle():
            pass

    def end(self, cause: str) -> None:
        """End all sequences and answer all calls, as the loop has ended."""
        self.batch.finish_all(FinishReason.CANCELLED)
        while self._calls:
            self._refuse(self._calls[0], AdvanceError(AdvanceFault.ENDED, cause))

    # ------------------------------------------------------------------ steps

    def schedule(self) -> Step | None:
        """The next step of the oldest call, or None if there is no call or it has to wait."""
        while self._calls:
            call = self._calls[0]
            step = Step(self.batch.resources.steps)
            if not call.outputs:
                try:
                    self.deferred = not self._begin(call, step)
                except AdvanceError as error:
                    self._refuse(call, error)
                    continue
                if self.deferred:
                    return None
            entries = self._fill(step, call)
            lacking = any(_lacks(sequence, target) for sequence, target in call.targets)
            if not (entries or step.encodes or lacking):
                self._answer(call)  # all that was left has been dropped meanwhile
                continue
            # Without entries, images of the scheduler's sequences may fill the encoder cache.
            self.batch.commit(step, entries)
            self._launched_ns = time.monotonic_ns()
            return step
        return None

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the result of the step that was launched last; may answer its call."""
        outputs = self.batch.update(result)
        call = self._calls[0]
        call.forward_ns += time.monotonic_ns() - self._launched_ns
        call.outputs.append(outputs)
        if not any(_lacks(sequence, target) for sequence, target in call.targets):
            self._answer(call)
        return outputs

    def fail(self, cause: str) -> StepOutputs:
        """End all sequences of the call whose step failed."""
        outputs = self.batch.fail(cause)
        call = self._calls[0]
        for sequence, _ in call.targets:
            if sequence.status is not Status.FINISHED:
                outputs.finished.append(self.batch.finish(sequence, FinishReason.ERROR, cause))
        self.drop(call.message.running)
        self._refuse(call, AdvanceError(AdvanceFault.FAILED, cause))
        return outputs

    # ------------------------------------------------------------------ one call

    def _begin(self, call: _Call, step: Step) -> bool:
        """Add new sequences, and allocate all for the first step; False if the call has to wait.

        Raises:
            AdvanceError: it is invalid or does not fit; nothing has changed.
        """
        if not call.added:
            self._add(call)
        running = [self._find(request_id) for request_id in call.message.running]
        call.targets = _targets(call, running)
        absent = [sequence for sequence, _ in call.targets if sequence.row < 0]
        if not all(self._is_ready(sequence) for sequence in absent):
            return False
        for sequence in (*call.new, *running):
            sequence.last_advanced = math.inf
        self._reserved.allocate(step, absent)
        # At least one token, even if more is cached than requested: the step carries the row.
        call.targets = [(s, max(target, s.num_computed + 1)) for s, target in call.targets]
        return True

    def _add(self, call: _Call) -> None:
        """Queue the new requests while their adapters are read and their grammars compiled."""
        call.added = True
        for request in call.message.new:
            try:
                if self.batch.config.decoder is not None:
                    raise ValueError("encoder-decoder models are not served to TGI's own router")
                self.batch.validate(request)
            except ValueError as error:
                raise AdvanceError(AdvanceFault.INVALID, str(error), request.request_id) from None
            sequence = self.batch.add(request)
            sequence.skip_forced = False  # each token has a probability
            call.new.append(sequence)

    def _find(self, request_id: int) -> Sequence:
        sequence = self.batch.live.get(request_id)
        if sequence is None:
            cause = self._errors.get(request_id, "the request is unknown")
            raise AdvanceError(AdvanceFault.INVALID, cause, request_id)
        return sequence

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether a sequence lacks nothing but a row and blocks."""
        request = sequence.request
        self._find(request.request_id)
        return self.batch.adapters.is_ready(request.adapter_id) and Grammars.is_ready(sequence)

    def _fill(self, step: Step, call: _Call) -> list[ScheduledSequence]:
        """Schedule decodes, then prompts within the step's budget."""
        entries: list[ScheduledSequence] = []
        left = [(s, target) for s, target in call.targets if _lacks(s, target)]
        decodes = [s for s, _ in left if s.decodes]
        drafts = self._propose(decodes)
        for sequence in decodes:
            if id(sequence) not in drafts:
                self.batch.compute(step, entries, sequence, 1)
        for sequence, tokens in drafts.values():
            self.batch.compute(step, entries, sequence, 1, tokens)
        step.num_decodes = len(entries)
        budget = self.batch.config.prefill_budget(len(entries))
        self.batch.begin_prefills(budget, waits=False)
        for sequence, target in left:
            if sequence.num_computed < target:
                count, budget = self.batch.plan(step, sequence, budget, target)
                if count:
                    self.batch.compute(step, entries, sequence, count)
        return entries

    def _propose(self, decodes: list[Sequence]) -> dict[int, tuple[Sequence, list[int]]]:
        """The sequences that are to verify drafts, by their ids, and the drafts.

        They have the blocks: all that they may ever need.
        """
        candidates = [
            sequence
            for sequence in decodes
            if sequence.num_computed >= sequence.prompt_tokens
            and sequence.num_tokens + 1 < sequence.max_tokens
        ]
        if self.batch.speculator is None or not candidates:
            return {}
        drafts = {}
        others = len(decodes) - len(candidates)
        proposals = self.batch.speculator.propose(candidates, False, others)
        for sequence, tokens in zip(candidates, proposals, strict=True):
            if sequence.images is not None:
                tokens = sequence.images.drafts(tokens)
            tokens = tokens[: sequence.max_tokens - sequence.num_tokens - 1]
            if tokens:
                drafts[id(sequence)] = (sequence, tokens)
        return drafts

    def _answer(self, call: _Call) -> None:
        """Answer a call whose targets are all computed."""
        for sequence, _ in call.targets:
            prefills = sequence.num_computed < sequence.prompt_tokens
            sequence.prompt_reached = sequence.num_computed if prefills else None
        pending = {
            sequence.request.request_id: sequence.prompt_tokens - sequence.prompt_reached
            for sequence in self._sequences(call)
            if sequence.prompt_reached is not None
        }
        self._end(call, Advanced(call.outputs, pending, call.forward_ns))

    def _refuse(self, call: _Call, error: AdvanceError) -> None:
        self.drop(sequence.request.request_id for sequence in call.new)
        self._end(call, error)

    def _end(self, call: _Call, outcome: Advanced | AdvanceError) -> None:
        self._calls.popleft()
        now = time.monotonic()
        for sequence in self._sequences(call):
            sequence.last_advanced = now
            self.batch.release_images(sequence)  # until an Advance names it again
        answer = call.message.answer
        if not answer.set_running_or_notify_cancel():
            return  # the sender has given up
        if isinstance(outcome, AdvanceError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def _sequences(self, call: _Call) -> Iterator[Sequence]:
        """The live sequences that a call names."""
        for request_id in (*call.message.running, *(s.request.request_id for s in call.new)):
            sequence = self.batch.live.get(request_id)
            if sequence is not None:
                yield sequence


def _lacks(sequence: Sequence, target: int) -> bool:
    return sequence.status is Status.RUNNING and sequence.num_computed < target


def _targets(call: _Call, running: Collection[Sequence]) -> list[tuple[Sequence, int]]:
    """The position up to which each sequence is to be computed."""
    targets = []
    budget = call.message.prefill_budget
    for sequence in running:
        target = sequence.num_tokens
        reached = sequence.prompt_reached
        if reached is not None:
            target = min(target, reached + budget)
            budget -= target - reached
            if target == reached:
                continue
        targets.append((sequence, target))
    for sequence, target in zip(call.new, call.message.new_targets, strict=True):
        targets.append((sequence, min(target, sequence.num_tokens)))
    return targets
