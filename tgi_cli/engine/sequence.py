"""One request as the engine sees it while it lives."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.step import GrammarMatcher


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Known tokens, computed tokens, blocks and row of one request.

    The scheduler's one rule: ``num_computed`` chases ``num_tokens``. A token that a step in
    flight will choose counts as known (a *placeholder*) before the host has seen it.

    Attributes:
        token_ids: prompt and generated tokens that the host knows.
        prompt_tokens: how many of them are the prompt.
        placeholders: tokens that steps in flight will add.
        stale_results: results of steps in flight that say what is known already.
        first_unsent: the first of its tokens that the worker's row lacks, -1: it has them all.
        matcher: where it stands in its grammar; None until that is compiled, and without one.
        skip_forced: tokens that its grammar leaves no choice about need not be chosen by the model.
        num_computed: tokens whose KV is computed, or will be by the steps in flight.
        block_ids: its block table.
        block_hashes: content hashes of the full blocks of ``token_ids``, as far as hashed.
        num_window_freed: leading blocks that a sliding window left behind and that were given back.
        num_indexed: leading blocks that were offered to the prefix cache.
        prompt_step: the step that computes the last of its prompt, -1 while none does.
        scored, context_reported: prompt positions whose log-probability, or whose raw logits,
            were handed out; they outlive preemption.
        row: its row in the worker, -1 while it waits.
        attempt: raised by each preemption; results of an older attempt are stale.
        rank: order of service and of sacrifice: priority, then arrival; the lowest comes first.
        ticket: how many admissions it stood to wait for when it was queued.
    """

    __slots__ = (
        "arrival_ns",
        "attempt",
        "block_hashes",
        "block_ids",
        "context_reported",
        "first_unsent",
        "matcher",
        "max_tokens",
        "num_computed",
        "num_indexed",
        "num_window_freed",
        "placeholders",
        "prompt_step",
        "prompt_tokens",
        "rank",
        "request",
        "row",
        "scored",
        "skip_forced",
        "stale_results",
        "started",
        "status",
        "stop_ids",
        "ticket",
        "token_ids",
    )

    def __init__(self, request: GenerationRequest, order: int) -> None:
        self.request = request
        self.token_ids = list(request.prompt_ids)
        self.prompt_tokens = len(self.token_ids)
        self.max_tokens = self.prompt_tokens + request.max_new_tokens
        self.stop_ids = frozenset() if request.ignore_eos else request.stop_token_ids
        self.placeholders = 0
        self.stale_results = 0
        self.first_unsent = -1
        self.matcher: GrammarMatcher | None = None
        # Those that look at every token, or may forbid any, get to see every one.
        self.skip_forced = not (
            request.logits_processors
            or request.return_generation_logits
            or request.sampling.bad_words
            or request.sampling.allowed_token_ids
        )
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_indexed = 0
        self.num_window_freed = 0
        self.prompt_step = -1
        self.row = -1
        self.attempt = 0
        self.scored = 1
        self.context_reported = 0
        self.ticket = 0
        self.status = Status.WAITING
        self.started = False
        self.arrival_ns = time.monotonic_ns()
        self.rank = (-request.priority, order)

    @property
    def num_tokens(self) -> int:
        """Known tokens, placeholders included."""
        return len(self.token_ids) + self.placeholders

    def jump(self, token_ids: list[int]) -> None:
        """Append tokens that no step chooses, after the last that one did.

        What a step in flight will choose is the first of them, or comes too late.
        """
        self.first_unsent = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.stale_results += self.placeholders
        self.placeholders = 0

    def rewind(self) -> None:
        """Forget what was computed: it will be recomputed from the known tokens."""
        self.placeholders = 0
        self.stale_results = 0
        self.first_unsent = -1
        self.num_computed = 0
        self.num_indexed = 0
        self.prompt_step = -1
        self.row = -1
        self.attempt += 1
        self.status = Status.WAITING


@dataclass(slots=True)
class ScheduledSequence:
    """One scheduled sequence of a step in flight."""

    sequence: Sequence
    attempt: int
    start: int
    end: int
    """Computed tokens once the step is done."""
    sampled: bool

    @property
    def is_current(self) -> bool:
        """Whether the sequence still runs as it did when the step was scheduled."""
        sequence = self.sequence
        return sequence.status is Status.RUNNING and sequence.attempt == self.attempt
