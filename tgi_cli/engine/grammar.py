"""What a request's text must be: when its grammar is compiled, and what it says of the next token.

The engine knows grammars as two protocols of :mod:`tgi_cli.engine.step`, which
:mod:`tgi_cli.worker.grammar` implements. A matcher stays with its sequence for life. It follows
the tokens that the host knows, so nothing of it has to be restored when the sequence is preempted
or resumed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any

from tgi_cli.engine.messages import FinishReason, GenerationRequest, StepOutputs
from tgi_cli.engine.sequence import ScheduledSequence, Sequence
from tgi_cli.engine.step import GrammarCompiler, GrammarMatcher


class Grammars:
    """Compiles the grammars of waiting requests and asks those of running ones.

    Args:
        compiler: None: requests with a grammar are refused.

    Attributes:
        live: requests with a grammar that wait or run.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self.live = 0
        self._compiler = compiler
        self._compiling: dict[int, tuple[Sequence, Future[GrammarMatcher]]] = {}
        self._choosing: list[tuple[int, ScheduledSequence]] = []

    def validate(self, request: GenerationRequest) -> None:
        """Check that a request may have a grammar. Raises ValueError."""
        if request.grammar is not None and self._compiler is None:
            raise ValueError("this engine has no support for grammars")

    def joined(self, sequence: Sequence) -> None:
        """A request was queued; its grammar is compiled while it waits."""
        request = sequence.request
        if request.grammar is None:
            return
        assert self._compiler is not None
        self.live += 1
        self._compiling[request.request_id] = (sequence, self._compiler.compile(request.grammar))

    def ended(self, sequence: Sequence) -> None:
        """It waits and runs no more."""
        if sequence.request.grammar is not None:
            self.live -= 1
            self._compiling.pop(sequence.request.request_id, None)

    @property
    def compiling(self) -> bool:
        """Whether there is something for :meth:`collect` to wait for."""
        return bool(self._compiling)

    def collect(self) -> list[tuple[Sequence, str]]:
        """Take in the matchers that are done; returns the sequences that get none, and why."""
        failed = []
        for request_id, (sequence, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            error = future.exception()
            if error is None:
                sequence.matcher = future.result()
            else:
                failed.append((sequence, f"the grammar cannot be used: {error}".splitlines()[0]))
        return failed

    @staticmethod
    def is_ready(sequence: Sequence) -> bool:
        """Whether a sequence need not wait for its grammar."""
        return sequence.matcher is not None or sequence.request.grammar is None

    def begin(self, entries: Many[ScheduledSequence]) -> None:
        """A step was scheduled."""
        self._choosing = []
        if self.live:
            sampled = (entry for entry in entries if entry.sampled)
            self._choosing = [(i, e) for i, e in enumerate(sampled) if e.sequence.matcher]

    @property
    def needs_mask(self) -> bool:
        """Whether the step scheduled last chooses a token of a request with a grammar."""
        return bool(self._choosing)

    def masks(self) -> tuple[list[int], Any] | None:
        """Those of the step scheduled last, once the results of all earlier ones are in."""
        assert self._compiler is not None
        indices, matchers = [], []
        for index, entry in self._choosing:
            matcher = entry.sequence.matcher
            if matcher is not None and entry.is_current and not entry.sequence.stale_results:
                indices.append(index)
                matchers.append(matcher)
        return (indices, self._compiler.fill(matchers)) if indices else None

    def follow(
        self, sequence: Sequence, token_id: int, outputs: StepOutputs
    ) -> tuple[FinishReason | None, str]:
        """Take in the token that was chosen, and jump over what it leaves no choice about.

        Returns:
            Whether the sequence ends with that, and how; and the error where that is the reason.
        """
        given, reason, error = self._after(sequence, token_id)
        if given:
            sequence.jump(given)
            told = sequence.request.sampling.top_logprobs > 0
            outputs.request_ids += [sequence.request.request_id] * len(given)
            outputs.token_ids += given
            outputs.logprobs += [0.0] * len(given)
            outputs.top_ids += [[i] if told else [] for i in given]
            outputs.top_logprobs += [[0.0] if told else [] for _ in given]
        return reason, error

    def _after(
        self, sequence: Sequence, token_id: int
    ) -> tuple[list[int], FinishReason | None, str]:
        """The tokens that follow without a choice, within the sequence's length, and its end."""
        matcher, request = sequence.matcher, sequence.request
        assert matcher is not None
        room = sequence.max_tokens - len(sequence.token_ids)
        least = sequence.prompt_tokens + request.sampling.min_new_tokens
        given: list[int] = []
        ahead: list[int] = []
        while True:
            if not matcher.accept(token_id):
                return given, *failure(sequence)
            if matcher.stopped:
                eos = self._eos_after(sequence, token_id)
                return given + eos[:room], FinishReason.EOS_TOKEN, ""
            if not room:
                return given, FinishReason.LENGTH, ""
            if not ahead and sequence.skip_forced:
                ahead = matcher.forced()
            if not ahead:
                return given, None, ""
            token_id = ahead.pop(0)
            early = len(sequence.token_ids) + len(given) < least
            if early and token_id in request.stop_token_ids:
                return given, None, ""  # the sampler will find that it has no choice
            given.append(token_id)
            room -= 1
            if token_id in sequence.stop_ids:
                return given, FinishReason.EOS_TOKEN, ""

    def _eos_after(self, sequence: Sequence, token_id: int) -> list[int]:
        """The stop id that the model would be made to choose once its grammar is complete."""
        assert self._compiler is not None
        ids = self._compiler.eos_token_ids
        if token_id in ids or not sequence.skip_forced:
            return []
        return [i for i in ids if i in sequence.stop_ids][:1]


def failure(sequence: Sequence, cause: str = "") -> tuple[FinishReason, str]:
    """How a sequence ends that cannot go on, and why: its grammar may be to blame."""
    error = "" if sequence.matcher is None else sequence.matcher.error
    if error:
        lines = f"the grammar cannot be followed: {error}".splitlines()
        return FinishReason.GRAMMAR, lines[0]
    return FinishReason.ERROR, cause or "the grammar does not allow the token that was chosen"
