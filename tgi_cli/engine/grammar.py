"""Grammars of requests: when they are compiled, and which tokens they allow next.

The engine knows grammars as two protocols of :mod:`tgi_cli.engine.step`, which
:mod:`tgi_cli.worker.grammar` implements. A matcher belongs to its sequence for life. It follows
the tokens that the host knows, so that preemption and resumption need not restore it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any

from tgi_cli.engine.messages import FinishReason, GenerationRequest, StepOutputs
from tgi_cli.engine.sequence import ScheduledSequence, Sequence
from tgi_cli.engine.step import GrammarCompiler, GrammarMatcher


class Grammars:
    """Compiles the grammars of waiting requests and follows those of running ones.

    Args:
        compiler: compiles grammars, or None to refuse requests that have one.

    Attributes:
        live: requests with a grammar that wait or run.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self.live = 0
        self._compiler = compiler
        self._compiling: dict[int, tuple[Sequence, Future[GrammarMatcher]]] = {}
        self._constrained: list[tuple[int, ScheduledSequence]] = []

    def validate(self, request: GenerationRequest) -> None:
        """Check that a request may have a grammar. Raises ValueError."""
        if request.grammar is not None and self._compiler is None:
            raise ValueError("this engine has no support for grammars")

    def add(self, sequence: Sequence) -> None:
        """A request was queued; its grammar is compiled while it waits."""
        request = sequence.request
        if request.grammar is None:
            return
        assert self._compiler is not None
        self.live += 1
        self._compiling[request.request_id] = (sequence, self._compiler.compile(request.grammar))

    def remove(self, sequence: Sequence) -> None:
        """A request has ended."""
        if sequence.request.grammar is not None:
            self.live -= 1
            self._compiling.pop(sequence.request.request_id, None)

    @property
    def compiling(self) -> bool:
        """Whether grammars are being compiled, for :meth:`collect` to wait for."""
        return bool(self._compiling)

    def collect(self) -> list[tuple[Sequence, str]]:
        """Take the matchers that are done; returns failed sequences and the causes."""
        failed = []
        for request_id, (sequence, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            error = future.exception()
            if error is None:
                sequence.matcher = future.result()
            else:
                failed.append((sequence, f"invalid grammar: {error}".splitlines()[0]))
        return failed

    @staticmethod
    def is_ready(sequence: Sequence) -> bool:
        """Whether a sequence does not wait for its grammar."""
        return sequence.matcher is not None or sequence.request.grammar is None

    def begin_step(self, entries: Many[ScheduledSequence]) -> None:
        """A step was scheduled."""
        self._constrained = []
        if self.live:
            sampled = (entry for entry in entries if entry.sampled)
            self._constrained = [(i, e) for i, e in enumerate(sampled) if e.sequence.matcher]

    @property
    def needs_mask(self) -> bool:
        """Whether the step scheduled last chooses a token of a request with a grammar."""
        return bool(self._constrained)

    def masks(self) -> tuple[list[int], Any] | None:
        """The masks of the step scheduled last, once all earlier results have been applied."""
        assert self._compiler is not None
        indices, matchers = [], []
        for index, entry in self._constrained:
            matcher = entry.sequence.matcher
            if matcher is not None and entry.is_current and not entry.sequence.stale_results:
                indices.append(index)
                matchers.append(matcher)
        return (indices, self._compiler.fill(matchers)) if indices else None

    def accept(
        self, sequence: Sequence, token_id: int, outputs: StepOutputs
    ) -> tuple[FinishReason | None, str]:
        """Accept the token that was chosen, and append the tokens that the grammar forces then.

        Returns:
            Why the sequence ends, or None if it does not, and the error if that is the reason.
        """
        forced, reason, error = self._forced_after(sequence, token_id)
        if forced:
            sequence.jump(forced)
            top = sequence.request.sampling.top_logprobs > 0
            outputs.request_ids += [sequence.request.request_id] * len(forced)
            outputs.token_ids += forced
            outputs.logprobs += [0.0] * len(forced)
            outputs.top_ids += [[i] if top else [] for i in forced]
            outputs.top_logprobs += [[0.0] if top else [] for _ in forced]
        return reason, error

    def _forced_after(
        self, sequence: Sequence, token_id: int
    ) -> tuple[list[int], FinishReason | None, str]:
        """The forced tokens after ``token_id``, within the sequence's length, and its end."""
        matcher, request = sequence.matcher, sequence.request
        assert matcher is not None
        remaining = sequence.max_tokens - len(sequence.token_ids)
        min_tokens = sequence.prompt_tokens + request.sampling.min_new_tokens
        forced: list[int] = []
        queue: list[int] = []
        while True:
            if not matcher.accept(token_id):
                return forced, *failure(sequence)
            if matcher.stopped:
                eos = self._eos_after(sequence, token_id)
                return forced + eos[:remaining], FinishReason.EOS_TOKEN, ""
            if not remaining:
                return forced, FinishReason.LENGTH, ""
            if not queue and sequence.skip_forced:
                queue = matcher.forced()
            if not queue:
                return forced, None, ""
            token_id = queue.pop(0)
            early = len(sequence.token_ids) + len(forced) < min_tokens
            if early and token_id in request.stop_token_ids:
                return forced, None, ""  # left to the sampler, which will find no other token
            forced.append(token_id)
            remaining -= 1
            if token_id in sequence.stop_ids:
                return forced, FinishReason.EOS_TOKEN, ""

    def _eos_after(self, sequence: Sequence, token_id: int) -> list[int]:
        """The stop id that a complete grammar forces, if any."""
        assert self._compiler is not None
        ids = self._compiler.eos_token_ids
        if token_id in ids or not sequence.skip_forced:
            return []
        return [i for i in ids if i in sequence.stop_ids][:1]


def failure(sequence: Sequence, cause: str = "") -> tuple[FinishReason, str]:
    """How a sequence ends that cannot continue, and why: perhaps because of its grammar."""
    error = "" if sequence.matcher is None else sequence.matcher.error
    if error:
        lines = f"the grammar cannot be completed: {error}".splitlines()
        return FinishReason.GRAMMAR, lines[0]
    return FinishReason.ERROR, cause or "the grammar does not allow the token that was chosen"
