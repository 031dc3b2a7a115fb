"""The state of one live request in the engine."""

from __future__ import annotations

import math
import time
from dataclasses import InitVar, dataclass, field
from enum import Enum
from operator import attrgetter

from tgi_cli.config import DecoderFacts
from tgi_cli.engine.block_store import StoredBlocks
from tgi_cli.engine.image_cache import CachedImage
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.prompt_images import PromptImages
from tgi_cli.engine.step import FRESH, GrammarMatcher
from tgi_cli.engine.thinking import ThinkingProgress


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens, computed tokens, blocks and row of one request.

    The scheduler's one rule: ``num_computed`` chases ``num_tokens``. A token that a step in
    flight will choose counts as known (a *placeholder*) before the host has seen it.

    Attributes:
        token_ids: prompt and generated tokens that the host knows.
        prompt_tokens: length of the prompt, including the token that a decoder starts with.
        max_tokens: upper bound of prompt and generated tokens.
        stop_ids: token ids that end it.
        skip_forced: whether tokens that its grammar forces may be appended without being sampled.
        followed: whether it has a grammar, a thinking budget or forced tokens of a decoder, which
            each token advances.
        reads_logits: whether its choices need masks of a grammar, processed or reported logits.
        last_id: token that is forced if the last position is reached, or None.
        thinking: its progress in its thinking budget, or None without one.
        num_unreported: tokens that were forced before the first choice, and are reported with it.
        priority_key: sorts by priority, then arrival; the lowest is served first and preempted
            last.
        matcher: its state in its grammar; None without a grammar, or before it is compiled.
        placeholders: tokens that steps in flight will add.
        stale_results: results of steps in flight whose tokens are known already.
        num_drafts: draft tokens that a step in flight verifies. No other step takes the sequence
            before the result shows how many are accepted.
        draft_source: where its latest drafts come from, such as "prediction" or "weights"; set by
            the speculator.
        first_unsent: position of the first token that the worker's row lacks, or -1 for none.
        num_computed: tokens whose KV is computed, or will be by the steps in flight.
        block_ids: its block table.
        state_slot: slot that its next step leaves its recurrent state in, or -1 while it waits and
            without states.
        state_source: slot that this step reads, or -1 for a fresh state.
        prompt_state: slot of a state at the last block boundary before the last token of its
            prompt, held for its forks; -1 for none.
        images: images of its prompt; None if it has none and may be split anywhere.
        images_end: prompt tokens from here on need no image, and may be split; 0 without images.
        held_images: the images that its next tokens need, by their indices.
        num_forks: forks of it that have not started.
        parent: the sequence it is a fork of, until it starts; else None.
        snapshot_at: position where a chunk is to end for a snapshot, or 0.
        rolls: whether it may have a rolling snapshot.
        rolling: slot and content hash of its latest rolling snapshot, or None.
        block_hashes: content hashes of the full blocks of ``token_ids``, as far as hashed.
        num_indexed: leading blocks that the prefix cache was offered.
        num_saved: leading blocks that the block store was offered, or -1 for no more.
        num_window_freed: leading blocks released since they are outside of the sliding window.
        load: stored blocks that are read for it while it waits, or None.
        load_from: index in its block table of the first of these.
        load_tried: whether stored blocks were read, or none are to be read.
        prompt_step: id of the step that computes the last token of its prompt, or -1 before.
        row: its row in the worker, or -1 while it waits.
        attempt: number of preemptions; results of an earlier attempt are stale.
        logprobs_reported, logits_reported: prompt positions whose log-probability, or whose raw
            logits, were sent to clients; preemption does not reset them.
        due: the count of admissions at which it would be admitted if none overtook it.
        started: whether it has ever had a row.
        reused_tokens: prompt tokens found in the prefix cache when it first got a row.
        prompt_reached: prompt tokens computed as far as the caller of external steps knows, or None
            once the whole prompt is computed.
        last_advanced: when an external step last named it, in ``time.monotonic()``; infinity during
            the step.
    """

    request: GenerationRequest
    order: InitVar[int]
    decoder: InitVar[DecoderFacts | None] = None
    whole_prompt: InitVar[bool] = False
    token_ids: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    skip_forced: bool = field(init=False)
    followed: bool = field(init=False)
    reads_logits: bool = field(init=False)
    last_id: int | None = field(init=False, default=None)
    thinking: ThinkingProgress | None = field(init=False, default=None)
    num_unreported: int = field(init=False, default=0)
    priority_key: tuple[int, int] = field(init=False)
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    matcher: GrammarMatcher | None = None
    placeholders: int = 0
    stale_results: int = 0
    num_drafts: int = 0
    draft_source: str = ""
    first_unsent: int = -1
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    state_slot: int = FRESH
    state_source: int = FRESH
    prompt_state: int = FRESH
    images: PromptImages | None = None
    images_end: int = 0
    held_images: dict[int, CachedImage] = field(default_factory=dict)
    num_forks: int = 0
    parent: Sequence | None = None
    snapshot_at: int = 0
    rolls: bool = False
    rolling: tuple[int, bytes] | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_indexed: int = 0
    num_saved: int = 0
    num_window_freed: int = 0
    load: StoredBlocks | None = None
    load_from: int = 0
    load_tried: bool = False
    prompt_step: int = -1
    row: int = -1
    attempt: int = 0
    logprobs_reported: int = 1
    logits_reported: int = 0
    due: int = 0
    status: Status = Status.WAITING
    started: bool = False
    reused_tokens: int = 0
    prompt_reached: int | None = None
    last_advanced: float = -math.inf

    def __post_init__(self, order: int, decoder: DecoderFacts | None, whole_prompt: bool) -> None:
        request = self.request
        self.token_ids = list(request.prompt_ids)
        if decoder is not None:
            self.token_ids.append(decoder.start_id)
        self.prompt_tokens = len(self.token_ids)
        self.max_tokens = self.prompt_tokens + request.max_new_tokens
        self.stop_ids = frozenset() if request.ignore_eos else request.stop_token_ids
        # Processors and lists may change or forbid any token.
        self.skip_forced = not (
            request.logits_processors
            or request.return_generation_logits
            or request.sampling.bad_words
            or request.sampling.allowed_token_ids
        )
        self.reads_logits = bool(
            request.grammar is not None
            or request.logits_processors
            or request.return_generation_logits
        )
        self.followed = request.grammar is not None or request.thinking is not None
        if decoder is not None:
            self._begin_answer(decoder)
        if request.thinking is not None:
            self.thinking = ThinkingProgress(request.thinking)
            self._begin()
        if request.images or whole_prompt:
            self.images = PromptImages(request, whole_prompt)
            self.images_end = self.images.end
        self.priority_key = (-request.priority, order)

    def _begin_answer(self, decoder: DecoderFacts) -> None:
        """Append the token that every answer begins with; limit the answer to the decoder's length.

        The last token of an answer needs no position.
        """
        if decoder.max_tokens is not None:
            self.max_tokens = min(self.max_tokens, self.prompt_tokens + decoder.max_tokens)
        own, available = self.request.first_id, self.max_tokens - self.prompt_tokens
        first = decoder.first_id if own is None else own
        if first is not None and available > 1 and first not in self.stop_ids:
            self.token_ids.append(first)
            self.num_unreported = 1
            self.followed = True
        if decoder.last_id is not None and not self.request.ignore_eos:
            self.last_id = decoder.last_id
            self.followed = True

    def _begin(self) -> None:
        """Append the tokens that a budget of 0 forces after a prompt that ends within reasoning."""
        assert self.thinking is not None
        due = self.thinking.due()
        # Those that would end the sequence are forced after its first token instead.
        if not due or len(due) >= self.request.max_new_tokens or self.stop_ids.intersection(due):
            return
        self.thinking.enforce()
        for token_id in due:
            self.thinking.accept(token_id)
        self.token_ids.extend(due)
        self.num_unreported += len(due)

    @property
    def num_tokens(self) -> int:
        """Known tokens, placeholders included."""
        return len(self.token_ids) + self.placeholders

    @property
    def decodes(self) -> bool:
        """Whether a single token is left to compute, which is not an image token."""
        return (
            len(self.token_ids) + self.placeholders - self.num_computed == 1
            and self.num_computed >= self.images_end
        )

    def next_chunk(self, budget: int) -> int:
        """How many of its known tokens a step with ``budget`` tokens computes next."""
        end = min(self.num_tokens, self.num_computed + budget)
        if self.num_computed < self.snapshot_at:
            end = min(end, self.snapshot_at)
        return end - self.num_computed

    def jump(self, token_ids: list[int]) -> None:
        """Append tokens that no step chooses, after the last chosen one.

        What a step in flight chooses for the first of their positions becomes a stale result.
        """
        self.first_unsent = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.stale_results += self.placeholders
        self.placeholders = 0

    def rewind(self) -> None:
        """Reset to the known tokens, which will be recomputed."""
        self.placeholders = 0
        self.stale_results = 0
        self.num_drafts = 0
        self.first_unsent = -1
        self.num_computed = 0
        self.num_indexed = 0
        self.num_saved = 0
        self.load_tried = False
        self.prompt_step = -1
        self.snapshot_at = 0
        self.row = -1
        self.attempt += 1
        self.status = Status.WAITING


by_priority = attrgetter("priority_key")


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A slot with the state of a sequence after its first ``position`` tokens."""

    position: int
    slot: int


@dataclass(slots=True)
class ScheduledSequence:
    """One scheduled sequence of a step in flight."""

    sequence: Sequence
    attempt: int
    start: int
    end: int
    """Computed tokens once the step is done, without drafts."""
    sampled: int
    """Tokens that the step chooses for it."""
    snapshot: StateSnapshot | None = None
    image_keys: frozenset[int] = frozenset()
    """Keys of the features that its tokens need."""
    drafts: list[int] = field(default_factory=list)

    @property
    def is_current(self) -> bool:
        """Whether the sequence still runs as it did when the step was scheduled."""
        sequence = self.sequence
        return sequence.status is Status.RUNNING and sequence.attempt == self.attempt
