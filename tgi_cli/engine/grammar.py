"""Grammars of requests: when they are compiled, and which tokens they allow next.

The engine uses grammars through two protocols of :mod:`tgi_cli.engine.step`, which
:mod:`tgi_cli.worker.grammar` implements. A matcher belongs to its sequence for life. It follows
the tokens that the host knows, so that preemption and resumption need not restore it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any

from tgi_cli.engine.forced_tokens import failure
from tgi_cli.engine.messages import GenerationRequest
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
        """Compile the grammar of a queued request while it waits."""
        request = sequence.request
        if request.grammar is None:
            return
        assert self._compiler is not None
        self.live += 1
        self._compiling[request.request_id] = (sequence, self._compiler.compile(request.grammar))

    def remove(self, sequence: Sequence) -> None:
        """Forget the grammar of a request that has ended."""
        if sequence.request.grammar is not None:
            self.live -= 1
            self._compiling.pop(sequence.request.request_id, None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens that a grammar that may end allows, the usual one first."""
        return () if self._compiler is None else self._compiler.eos_token_ids

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
                sequence.matcher = matcher = future.result()
                begun = sequence.token_ids[sequence.prompt_tokens :]
                if not all(map(matcher.accept, begun)):
                    failed.append((sequence, failure(sequence)[1]))
            else:
                failed.append((sequence, f"invalid grammar: {error}".splitlines()[0]))
        return failed

    @staticmethod
    def is_ready(sequence: Sequence) -> bool:
        """Whether a sequence does not wait for its grammar."""
        return sequence.matcher is not None or sequence.request.grammar is None

    def begin_step(self, entries: Many[ScheduledSequence]) -> None:
        """Note the entries of the step just scheduled."""
        self._constrained = []
        if self.live:
            first = 0
            for entry in entries:
                if entry.sampled and entry.sequence.matcher is not None:
                    self._constrained.append((first, entry))
                first += entry.sampled

    @property
    def needs_mask(self) -> bool:
        """Whether the step scheduled last chooses a token of a request with a grammar."""
        return bool(self._constrained)

    def masks(self) -> tuple[list[int], Any] | None:
        """The masks of the step scheduled last, once all earlier results have been applied."""
        assert self._compiler is not None
        indices: list[int] = []
        matchers: list[GrammarMatcher] = []
        drafts: list[list[int]] = []
        for first, entry in self._constrained:
            matcher = entry.sequence.matcher
            if matcher is not None and entry.is_current and not entry.sequence.stale_results:
                indices.extend(range(first, first + entry.sampled))
                matchers.append(matcher)
                drafts.append(entry.drafts)
        if not indices:
            return None
        return indices, self._compiler.fill(matchers, drafts if any(drafts) else None)
