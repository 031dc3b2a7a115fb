"""Steps that somebody outside asks for: over sequences that he names, one at a time.

The engine's own scheduler decides who computes what. Here the sender of an
:class:`~tgi_cli.engine.messages.Advance` does, as text-generation-inference's router does with
its shards; between two of them nothing happens to what he holds. Both work on the same device,
and neither can see the other but for the time that it takes:

==============  ===============================================================================
shared          how
==============  ===============================================================================
the device      steps alternate; what the scheduler has in flight is waited for first. An
                Advance of more prompt tokens than one step may have becomes several steps
rows, blocks    a held sequence has all that it may ever need; see engine/reserved_sequences.py
cached blocks   each finds the prefixes that the other computed
adapters        a slot is kept by whoever runs with it
==============  ===============================================================================
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tgi_cli.engine.grammar import Grammars
from tgi_cli.engine.messages import (
    Advance,
    Advanced,
    AdvanceError,
    AdvanceFault,
    Finished,
    FinishReason,
    StepOutputs,
)
from tgi_cli.engine.reserved_sequences import ReservedSequences
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.sequence import ScheduledSequence, Sequence, Status
from tgi_cli.engine.step import GrammarCompiler, Step, StepResult


@dataclass(slots=True, eq=False)
class _Call:
    """An Advance under way.

    Attributes:
        new: the sequences that it brought; none before it is entered.
        targets: what it has to compute: each sequence, up to so many tokens.
        outputs, forward_ns: of its steps so far.
    """

    asked: Advance
    new: list[Sequence] = field(default_factory=list)
    targets: list[tuple[Sequence, int]] = field(default_factory=list)
    outputs: list[StepOutputs] = field(default_factory=list)
    forward_ns: int = 0
    entered: bool = False


class ExternalStepScheduler(ReservedSequences):
    """A scheduler whose steps are asked for. Owned, like the other, by the core loop's thread.

    Args:
        host: schedules what nobody drives.
        grammars: compiles them; None: no request may have one.

    Attributes:
        deferred: the call at the head waits for what threads read or compile.
    """

    def __init__(self, host: Scheduler, grammars: GrammarCompiler | None = None) -> None:
        super().__init__(host, grammars)
        self.deferred = False
        self._calls: deque[_Call] = deque()
        self._reached: dict[int, int] = {}
        """Prompt tokens that were computed as far as the caller knows, while some are left."""
        self._errors: dict[int, str] = {}
        """Why those ended that did so before their first step."""
        self._launched_ns = 0

    # ------------------------------------------------------------------ messages

    @property
    def calls(self) -> int:
        """Advances that wait or are under way; may be read from any thread."""
        return len(self._calls)

    def advance(self, message: Advance) -> None:
        """Take in a call; it is answered through its future."""
        self._calls.append(_Call(message))

    def drop(self, request_ids: Iterable[int]) -> None:
        """End held sequences."""
        for request_id in request_ids:
            self.cancel(request_id)
            self._errors.pop(request_id, None)

    def collect(self, failed: Iterable[tuple[int, str]]) -> None:
        """Take in what threads have done: grammars, and the adapters that could not be read."""
        for finished in (*self.fail_adapters(failed), *self.collect_grammars()):
            self._errors[finished.request_id] = finished.error
        self.deferred = False

    def end(self, cause: str) -> None:
        """The loop is over: end everything, answer everybody."""
        self.cancel_all()
        while self._calls:
            self._refuse(self._calls[0], AdvanceFault.ENDED, cause)

    # ------------------------------------------------------------------ steps

    def schedule(self) -> Step | None:
        """The next step of the call at the head, or None: there is none, or it has to wait."""
        while self._calls:
            call = self._calls[0]
            if not call.outputs:
                try:
                    step = self._begin(call)
                except AdvanceError as error:
                    self._refuse(call, error.fault, error.cause, error.request_id)
                    continue
                if step is None:
                    self.deferred = True
                    return None
            else:
                step = Step(self._host._step_id)
            entries = self._fill(step, call)
            if not entries:  # nothing left: what was dropped meanwhile needs no step
                self._answer(call)
                continue
            if self._freed:
                step.freed = self._freed.copy()
                self._freed.clear()
            self.grammars.begin(entries)
            self._host._step_id += 1  # one row of numbers for the steps of both
            self._host._context_tokens += step.num_tokens - step.num_decodes
            self._in_flight.append(entries)
            self._launched_ns = time.monotonic_ns()
            return step
        return None

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the result of the step that was launched last; may answer its call."""
        outputs = super().update(result)
        call = self._calls[0]
        call.forward_ns += time.monotonic_ns() - self._launched_ns
        call.outputs.append(outputs)
        if not any(self._lacks(sequence, target) for sequence, target in call.targets):
            self._answer(call)
        return outputs

    def fail(self, cause: str) -> StepOutputs:
        """The step broke: all sequences of its call end, and its sender is told."""
        outputs = super().fail(cause)
        call = self._calls[0]
        for sequence, _ in call.targets:
            if sequence.status is not Status.FINISHED:
                outputs.finished.append(self._finish(sequence, FinishReason.ERROR, cause))
        self.drop(call.asked.held)
        self._refuse(call, AdvanceFault.FAILED, cause)
        return outputs

    def join_reason(self, step: Step) -> str:
        return ""

    def describe(self, outputs: StepOutputs) -> None:
        """What there is to tell of the engine as a whole, the host tells."""

    # ------------------------------------------------------------------ one call

    def _begin(self, call: _Call) -> Step | None:
        """Enter a call and place its sequences in its first step; None: it has to wait.

        Raises:
            AdvanceError: it cannot be; nothing was changed.
        """
        if not call.entered:
            self._enter(call)
        held = [self._held(request_id) for request_id in call.asked.held]
        call.targets = self._targets(call, held)
        absent = [sequence for sequence, _ in call.targets if sequence.row < 0]
        if not all(self._is_ready(sequence) for sequence in absent):
            return None
        for sequence in (*call.new, *held):
            self._used[sequence.request.request_id] = math.inf
        step = Step(self._host._step_id)
        self._place(step, absent)
        # One token at least, so that the step carries the row; its cache may hold more than asked.
        call.targets = [(s, max(target, s.num_computed + 1)) for s, target in call.targets]
        return step

    def _enter(self, call: _Call) -> None:
        """Queue the new ones, where their adapters and grammars are made ready."""
        call.entered = True
        for request in call.asked.new:
            refused = self.add(request)
            if refused is not None:
                raise AdvanceError(AdvanceFault.INVALID, refused.error, refused.request_id)
            sequence = self._live[request.request_id]
            sequence.skip_forced = False  # one token a step, and each with its probability
            call.new.append(sequence)

    def _held(self, request_id: int) -> Sequence:
        sequence = self._live.get(request_id)
        if sequence is None:
            cause = self._errors.get(request_id, "it is not held")
            raise AdvanceError(AdvanceFault.INVALID, cause, request_id)
        return sequence

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether nothing is lacking but room."""
        request = sequence.request
        self._held(request.request_id)
        return self.adapters.is_ready(request.adapter_id) and Grammars.is_ready(sequence)

    def _targets(self, call: _Call, held: Collection[Sequence]) -> list[tuple[Sequence, int]]:
        """How far each sequence is to be computed."""
        targets = []
        chunk = call.asked.chunk
        for sequence in held:
            reached = self._reached.get(sequence.request.request_id)
            target = sequence.num_tokens
            if reached is not None:
                target = min(target, reached + chunk)
                chunk -= target - reached
                if target == reached:
                    continue
            targets.append((sequence, target))
        for sequence, upto in zip(call.new, call.asked.upto, strict=True):
            targets.append((sequence, min(upto, sequence.num_tokens)))
        return targets

    def _fill(self, step: Step, call: _Call) -> list[ScheduledSequence]:
        """What the step computes: tokens that follow others first, prompts within its budget."""
        entries: list[ScheduledSequence] = []
        left = [(s, target) for s, target in call.targets if self._lacks(s, target)]
        for sequence, _ in left:
            if sequence.num_tokens - sequence.num_computed == 1:
                self._compute(step, entries, sequence, 1)
        step.num_decodes = len(entries)
        most = self.limits.max_batch_prefill_tokens
        budget = max(most - len(entries), max(1, most // 4))
        for sequence, target in left:
            count = min(target - sequence.num_computed, budget)
            if count > 0:
                self._compute(step, entries, sequence, count)
                budget -= count
        return entries

    def _lacks(self, sequence: Sequence, target: int) -> bool:
        return sequence.status is Status.RUNNING and sequence.num_computed < target

    def _answer(self, call: _Call) -> None:
        """All is computed."""
        for sequence, _ in call.targets:
            request_id = sequence.request.request_id
            if sequence.status is Status.FINISHED or not self._is_prompt(sequence):
                self._reached.pop(request_id, None)
            else:
                self._reached[request_id] = sequence.num_computed
        pending = {}
        for request_id in (*call.asked.held, *(s.request.request_id for s in call.new)):
            reached = self._reached.get(request_id)
            if reached is not None:
                pending[request_id] = self._live[request_id].prompt_tokens - reached
        self._end(call, Advanced(call.outputs, pending, call.forward_ns))

    @staticmethod
    def _is_prompt(sequence: Sequence) -> bool:
        return sequence.num_computed < sequence.prompt_tokens

    def _refuse(
        self, call: _Call, fault: AdvanceFault, cause: str, request_id: int | None = None
    ) -> None:
        for sequence in call.new:
            self.drop([sequence.request.request_id])
        self._end(call, AdvanceError(fault, cause, request_id))

    def _end(self, call: _Call, outcome: Advanced | AdvanceError) -> None:
        self._calls.popleft()
        now = time.monotonic()
        for request_id in (*call.asked.held, *(s.request.request_id for s in call.new)):
            if request_id in self._used:
                self._used[request_id] = now
        answer = call.asked.answer
        if not answer.set_running_or_notify_cancel():
            return  # whoever asked has given it up
        if isinstance(outcome, AdvanceError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    # ------------------------------------------------------------------ ends

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> Finished:
        self._reached.pop(sequence.request.request_id, None)
        return super()._finish(sequence, reason, error)
