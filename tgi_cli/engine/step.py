"""The contract between scheduler and worker: numbers only, no torch.

A worker keeps one persistent *row* per running sequence (token ids, block table, sampling
state); a :class:`Step` carries only what changed since the last one and what to compute now.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tgi_cli.engine.image_slices import NOTHING_ENCODED, EncodeReport, EncodeSlice, ImageSpan
from tgi_cli.engine.logits_processor import LogitsProcessor
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class OptionalOutputs:
    """Rarely used fields of a :class:`~tgi_cli.engine.messages.GenerationRequest`."""

    stop_token_ids: frozenset[int] = frozenset()
    """Stop ids that are not chosen before ``sampling.min_new_tokens`` tokens."""
    prompt_logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    client_id: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False

    @staticmethod
    def of(request: GenerationRequest) -> OptionalOutputs:
        """The worker's part of a request beyond the sampling parameters."""
        minimum = request.sampling.min_new_tokens > 0
        if not (
            minimum
            or request.logits_processors
            or request.return_generation_logits
            or request.computes_whole_prompt
        ):
            return NO_EXTRAS
        return OptionalOutputs(
            stop_token_ids=request.stop_token_ids if minimum else frozenset(),
            prompt_logprobs=request.prompt_logprobs,
            logits_processors=request.logits_processors,
            client_id=request.client_id,
            return_context_logits=request.return_context_logits,
            return_generation_logits=request.return_generation_logits,
        )


NO_EXTRAS = OptionalOutputs()


class RowImage(NamedTuple):
    """An image in the prompt of a row: see :class:`~tgi_cli.engine.messages.ImageInput`."""

    spans: tuple[tuple[int, int], ...]
    grid: tuple[int, int] | None = None
    bidirectional: bool = False


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that takes a row: a new request, or a preempted one that resumes.

    ``token_ids`` are its known tokens, ``prompt_tokens`` the length of the prompt that they begin
    with (a resumed sequence brings its generated tokens along).
    ``block_ids`` is its whole block table so far, cached prefix blocks included.
    ``adapter_slot`` holds its LoRA adapter for as long as it has the row, or is -1 for none.
    ``images`` are those of its prompt, in the order of their first positions.
    """

    row: int
    request_id: int
    token_ids: list[int]
    prompt_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    extras: OptionalOutputs = NO_EXTRAS
    adapter_slot: int = -1
    images: tuple[RowImage, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockAppend:
    """Blocks that a running row gained: ``block_ids`` go to the block table from ``start``."""

    row: int
    start: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class TokenAppend:
    """Tokens of a running row that no step chose, for the positions from ``start`` on.

    Either they are its next tokens (forced tokens), or a guess at them (draft tokens).
    """

    row: int
    start: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a recurrent state in the middle of a step.

    Entry ``index`` of the step writes its state into ``slot`` after its first ``count`` tokens.
    """

    index: int
    count: int
    slot: int


FRESH = -1
"""Instead of a slot to read: a state of zeros."""


@dataclass(slots=True)
class Step:
    """One forward pass over a flat batch.

    ``rows``, ``starts``, ``counts`` and ``samples`` are parallel, one entry per scheduled
    sequence, decodes before prefills: compute positions ``starts[i] .. starts[i]+counts[i]``
    of row ``rows[i]``, and choose the token that follows each of the last ``samples[i]`` of them.
    A chosen token is written to its position on the device, so that the next step can read it
    before the host knows it.

    An entry whose row is in ``drafts`` computes draft tokens after its last known one, and samples
    after that and after each of them: ``samples[i]`` is one more than there are drafts. Each token
    is chosen as if the drafts before it were the row's tokens, so the choices up to the first that
    differs from its draft are those that steps without drafts would make. Drafts are written to
    their rows before the forward pass, and chosen tokens over them. Entries with drafts follow
    other decodes.

    ``freed`` rows are released before ``new`` rows are written; ``copies`` are (source,
    destination) blocks to be copied before the forward (copy-on-write), after ``loads`` (block,
    content from :mod:`~tgi_cli.engine.block_store`) were written. Before both, ``offloads``
    (block, slot) are copied to slots of the host's memory, then ``restores`` (slot, block) back
    (:mod:`~tgi_cli.engine.host_blocks`), each in their order. ``adapters`` are
    (slot, adapter id) to be put on the device before it; no row uses such a slot any more.
    ``forced_tokens`` are written to their rows before it, too, over tokens that earlier steps
    chose for the same positions.

    For a model with recurrent states, ``state_in`` and ``state_out`` have the slots that each entry
    reads before its first token (:data:`FRESH`: a fresh state) and writes after its last, parallel
    to ``rows``; they are empty otherwise. ``snapshots`` are written in between.

    For a model in several pipeline stages, ``first_tokens`` has the token at the first position of
    each entry, parallel to ``rows``, since only the last stage knows it. It is empty otherwise.

    ``proposals``, parallel to ``rows``, is the number of drafts that the worker is to propose for
    each, after the last token that it chooses and the row keeps. If it is empty, no drafts are
    wanted, and a worker that can catch up later need not follow the sequences.

    ``dropped_images`` are keys of features to be forgotten before ``encodes`` run, and these run
    before the forward pass, but for those that time bounds: they use what it leaves of their time.
    ``images`` are in the order of the step's tokens. A step may encode and
    compute no token. An entry with an image token is no decode.

    ``reads_logits`` is whether any token is chosen for a request with a grammar, logits processors
    or reported logits, which one process alone has of a model's several.
    """

    step_id: int
    freed: list[int] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    appended: list[BlockAppend] = field(default_factory=list)
    forced_tokens: list[TokenAppend] = field(default_factory=list)
    drafts: list[TokenAppend] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    offloads: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, bytes]] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    state_in: list[int] = field(default_factory=list)
    state_out: list[int] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    proposals: list[int] = field(default_factory=list)
    dropped_images: list[int] = field(default_factory=list)
    encodes: list[EncodeSlice] = field(default_factory=list)
    images: list[ImageSpan] = field(default_factory=list)
    num_decodes: int = 0
    """How many leading entries compute one known token each, with or without drafts after it."""
    reads_logits: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_sampled(self) -> int:
        return sum(self.samples)

    @property
    def num_drafts(self) -> int:
        return sum(len(draft.token_ids) for draft in self.drafts)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that are neither decoded nor drafts."""
        return self.num_tokens - self.num_decodes - self.num_drafts


MAX_DRAFT_ROWS = 64
"""Draft tokens in one step at most, over all sequences."""


class StepTime(NamedTuple):
    """A step's duration: ``rows`` tokens of ``sequences`` with ``context`` tokens each, and then
    ``proposals`` drafts for each, before which the drafter computed ``lag`` tokens of each."""

    sequences: int
    rows: int
    context: int
    seconds: float
    proposals: int = 0
    lag: int = 0


class Proposal(NamedTuple):
    """Drafts that the worker proposes, with the probability that the drafter gives to each."""

    token_ids: list[int]
    chances: list[float]


@dataclass(frozen=True, slots=True)
class ChunkLogprobs:
    """Log-probabilities of the prompt tokens that follow a chunk's positions.

    The first entry is of the token at ``start``, one more than the chunk's first position.
    """

    start: int
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(slots=True)
class StepResult:
    """The sampler's choices, ``Step.samples[i]`` of each entry ``i`` of the step, in its order.

    ``errors`` maps an index of these entries to the cause of that row's own failure (its token
    is then meaningless). ``generation_logits`` maps such an index to the raw logits (float32
    numpy [V]). ``prompt_logprobs`` and ``context_logits`` (float32 numpy [count, V]) map an index
    of ``Step.rows``, sampled or not. So does ``proposals``: drafts after the last token that was
    chosen for the entry, the one after its accepted drafts. Results of entries that use images in
    ``encodes.failed`` are invalid.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, ChunkLogprobs] = field(default_factory=dict)
    context_logits: dict[int, Any] = field(default_factory=dict)
    generation_logits: dict[int, Any] = field(default_factory=dict)
    proposals: dict[int, Proposal] = field(default_factory=dict)
    encodes: EncodeReport = NOTHING_ENCODED


class PendingResult(Protocol):
    """A result that may still be on its way from the device."""

    def wait(self) -> StepResult:
        """Block until the host has the tokens. Raises what the step raised."""
        ...


class AdapterStore(Protocol):
    """Host memory for LoRA adapters; the engine decides which adapters it holds."""

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        """Read an adapter's folder and check it, on a thread; returns at once.

        Once the future is done without an error, the adapter is in host memory and steps may put it
        on the device. Its error is a :class:`tgi_cli.errors.TgiError` that names what does not fit.
        """
        ...

    def forget_adapter(self, adapter_id: int) -> None:
        """Drop it from host memory; a copy in a slot of the device remains."""
        ...


class GrammarMatcher(Protocol):
    """The state of one sequence in its grammar."""

    @property
    def stopped(self) -> bool:
        """Whether the grammar is complete: only a stop id may follow, or has followed."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot continue, in one line, or empty if it can."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by the next token; False, with an error, if the grammar does not allow it."""
        ...

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens may all follow, one after another; none is accepted."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow one after another."""
        ...

    def forced(self) -> list[int]:
        """Tokens that the grammar forces next, in canonical tokenization; not accepted yet."""
        ...


class GrammarCompiler(Protocol):
    """Makes matchers for one model's vocabulary."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens allowed where a grammar may end, the usual one first."""
        ...

    def compile(self, grammar: str) -> Future[GrammarMatcher]:
        """A new matcher at a grammar's beginning, compiled off the caller's thread.

        The future may be done at once. Its error is the grammar's, in one line.
        """
        ...

    def fill(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> Any:
        """The tokens that each may take next, as :meth:`Worker.sample` expects them.

        int32 [M, ceil(V / 32)], to be read before the next call. All zero if nothing may follow.
        With draft tokens for each matcher, its mask is followed by one after each of its drafts, as
        if it had accepted them; those after a draft that the grammar forbids allow every token,
        for what is chosen there is discarded.
        """
        ...


class Worker(AdapterStore, Protocol):
    """Runs steps, in the order of the calls. One ``launch`` is followed by its ``sample``.

    Raises:
        tgi_cli.errors.OutOfMemoryError: the device ran out of memory in the step.
        RuntimeError: the step failed for another reason; all rows in it are lost.
        tgi_cli.errors.ShardError: a process that computes the model is lost, and no step can be
            run any more.
    """

    def launch(self, step: Step) -> object:
        """Apply the row changes and start the forward; returns a handle without waiting."""
        ...

    def sample(
        self, handle: object, masks: tuple[Sequence[int], Any] | None = None
    ) -> PendingResult:
        """Choose tokens from the logits of ``handle``; returns without waiting for the host.

        ``masks`` are those of the rows with a grammar: indices of sampled entries, and for each
        which tokens it may choose, packed: int32 [M, ceil(V / 32)] on the host (numpy or torch),
        bit i of word w set if token 32 w + i is allowed (the layout of xgrammar and
        llguidance). They apply after penalties, before temperature. A row whose mask or other
        constraints leave no token fails alone (``StepResult.errors``).
        """
        ...
