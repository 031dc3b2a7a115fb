"""Messages to and from the engine: frozen, one type per purpose, no torch.

The inbox of the core loop takes GenerationRequest, Cancel, LoadAdapter, UnloadAdapter, Advance,
Drop, Fail and Shutdown; its outbox gives one StepOutputs per step that produced anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any

from tgi_cli.engine.logits_processor import LogitsProcessor
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.sampling.params import SamplingParams, sample_seed
from tgi_cli.telemetry.context import TraceContext


class FinishReason(IntEnum):
    """Why a request ended. The first three carry TGI's wire numbers."""

    LENGTH = 0
    EOS_TOKEN = 1
    STOP_SEQUENCE = 2
    CANCELLED = 3
    ERROR = 4
    TIMEOUT = 5  # its timeout has elapsed
    OVERLOADED = 6  # the queue was full
    GRAMMAR = 7  # its grammar is invalid, or cannot be completed
    DRAINING = 8  # the engine takes no more requests; nothing of this one was computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """An image of a prompt, ready for the model's encoder.

    Attributes:
        digest: 32 bytes that differ where the image or its processing does.
        spans: start and length of the runs of prompt positions that stand for its rows, in order.
        tensors: numpy arrays, by the names of the encoder's arguments.
        grid: rows and columns of its tokens, for rotary positions on three axes; else None.
        bidirectional: whether its tokens attend to each other in both directions.
    """

    digest: bytes
    spans: tuple[tuple[int, int], ...]
    tensors: Mapping[str, Any] = field(compare=False, repr=False)
    grid: tuple[int, int] | None = None
    bidirectional: bool = False

    @property
    def num_rows(self) -> int:
        """Prompt positions that it takes."""
        return sum(count for _, count in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to be continued.

    Attributes:
        request_id: unsigned 64-bit; unique among live requests.
        prompt_ids: token ids, at least one; ``sampling`` says how the next ones are chosen.
        max_new_tokens: upper bound of generated tokens, at least 1.
        stop_token_ids: ids that end the request, themselves part of the output.
        ignore_eos: the stop ids do not end it (for benchmarks).
        cache_salt: sequences share cached prefixes only under the same salt.
        tenant: who sent it, as opaque bytes. Drafts are taken from answers to requests of the same
            tenant, salt and adapter only.
        priority: higher is served first and preempted last; a signed 64-bit number.
        timeout_seconds: from its arrival at the engine, or None for no limit.
        prompt_logprobs: report the log-probability of each prompt token after the first, and of
            this number of the likeliest tokens at its position, or None for none. Such a prompt is
            computed whole, its cached prefix included.
        logits_processors: called in order on the row's raw logits before anything else, with
            ``client_id``; in the engine's own process only.
        return_context_logits, return_generation_logits: return raw logits, of every prompt
            position or of every generated token; in the engine's own process only.
        fork_of: id of a live request with the same prompt, salt and adapter (another sample of
            it): the prompt's KV is computed once and shared, copied only where the two write.
        adapter_id: of a loaded LoRA adapter, or 0 for the base model.
        grammar: a grammar of llguidance in its JSON form, of bounded size, that constrains the
            generated text (https://github.com/guidance-ai/llguidance), or None for free text. It
            ends the request, as a stop id does, where only a stop id may follow, even with
            ``ignore_eos``.
        thinking: the most reasoning that the request may generate, or None for any.
        prediction: token ids that the answer is expected to resemble (OpenAI's predicted outputs),
            which drafts are taken from; the answer does not depend on them.
        first_id: that the answer of an encoder-decoder model begins with; None for the default.
        images: of the prompt, in order; ``prompt_ids`` has the model's image token for each row.
        trace: span that its spans are children of, or None; the core loop does not use it.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    cache_salt: bytes = b""
    tenant: bytes = b""
    priority: int = 0
    timeout_seconds: float | None = None
    fork_of: int | None = None
    adapter_id: int = 0
    grammar: str | None = None
    thinking: ThinkingBudget | None = None
    prediction: tuple[int, ...] = ()
    first_id: int | None = None
    images: tuple[ImageInput, ...] = ()
    trace: TraceContext | None = None
    prompt_logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    client_id: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether every prompt position is computed, cached or not."""
        return self.prompt_logprobs is not None or self.return_context_logits

    def fork(self, request_id: int, sample: int) -> GenerationRequest:
        """The request of another sample of the prompt, number ``sample`` (at least 1)."""
        sampling = self.sampling
        return replace(
            self,
            request_id=request_id,
            sampling=replace(sampling, seed=sample_seed(sampling.seed, sample)),
            fork_of=self.request_id,
            # A fork's prompt is not computed; the first sample reports on it.
            prompt_logprobs=None,
            return_context_logits=False,
        )


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request at the next step. One that is unknown or has ended is ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Read a LoRA adapter and check that it fits the model; answered by an AdapterAnswer.

    Attributes:
        adapter_id: above 0, chosen by the caller and never used again, not even after an error
            or an unloading, so that cached KV of one adapter never serves another.
        name: for messages.
        path: its folder, in PEFT's form, on the machine of the model.
    """

    adapter_id: int
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Unload an adapter: new requests for it are refused from now on, live ones finish.

    Answered by an AdapterAnswer once no live request uses it.
    """

    adapter_id: int


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """The outcome of a LoadAdapter or an UnloadAdapter; those of one adapter come in order.

    ``error`` is the cause in one line, with the remedy if there is one, or empty on success.
    """

    adapter_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the loop at once because the worker is lost; live requests end with the cause."""

    cause: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the loop; live requests are cancelled."""


@dataclass(frozen=True, slots=True)
class Started:
    """A request got its first row. Times are ``time.monotonic_ns()`` differences."""

    request_id: int
    queue_ns: int
    cached_tokens: int
    """Leading prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. ``error`` is the cause in one line where the reason needs one."""

    request_id: int
    reason: FinishReason
    error: str = ""


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """A step has verified draft tokens of a request.

    Attributes:
        drafted: their number, at least 1.
        accepted: how many of them, from the first on, are the tokens that the step has chosen. One
            more token follows them in the same step, unless the request ends before.
        source: where they come from: ``prediction`` (the request's), ``context``, ``recent``,
            ``grammar`` or ``weights``, as docs/speculation.md describes.
    """

    request_id: int
    drafted: int
    accepted: int
    source: str = ""

    @property
    def predicted(self) -> bool:
        """Whether they were taken from the request's ``prediction``."""
        return self.source == "prediction"


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of prompt tokens, as parallel arrays.

    The first entry is of the token at position ``start`` (at least 1: nothing precedes token
    0). ``top_ids`` and ``top_logprobs`` are empty lists unless requested.
    """

    request_id: int
    start: int
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Logits:
    """Raw logits, float32 numpy array [n, V]: of the positions from ``start`` on.

    Row i are the logits computed at position ``start + i``, which choose the token after it.
    """

    request_id: int
    start: int
    values: Any


@dataclass(slots=True)
class StepOutputs:
    """All outputs of one step, as parallel arrays (one entry per token).

    A request may appear more than once; its tokens are in order. ``logprobs`` are natural
    logarithms of the model's own distribution (before penalties, temperature and filters); 0.0
    for a token that a grammar forced, which was not computed.
    ``top_ids[i]`` and ``top_logprobs[i]`` are empty unless requested.
    """

    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    drafts: list[VerifiedDrafts] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    adapters: list[AdapterAnswer] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether it has anything for a client."""
        return bool(self.request_ids or self.started or self.finished) or bool(
            self.prompt_logprobs or self.logits or self.adapters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """One externally driven step over exactly these sequences; see engine/external_steps.py.

    Attributes:
        new: requests to add, all or none of them. They never wait in the engine's queue.
        new_targets: for each of them, prompt tokens to compute now, counted from the first; at
            least one beyond its cached prefix is computed.
        running: ids of requests that earlier messages added.
        prefill_budget: tokens that those of them whose prompts are unfinished may compute together.
        answer: resolves to an Advanced, or to an AdvanceError.
    """

    new: tuple[GenerationRequest, ...] = ()
    new_targets: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    prefill_budget: int
    answer: Future[Advanced]


@dataclass(frozen=True, slots=True)
class Advanced:
    """The result of an Advance.

    Attributes:
        outputs: of its steps, in order.
        pending: prompt tokens still to be computed, by the ids of requests with unfinished prompts.
        forward_ns: nanoseconds from launches to results.
    """

    outputs: list[StepOutputs]
    pending: dict[int, int]
    forward_ns: int


@dataclass(frozen=True, slots=True)
class Drop:
    """End requests that an Advance added. Unknown and finished ones are ignored."""

    request_ids: tuple[int, ...]


class AdvanceFault(Enum):
    """Why an Advance was refused. All but FAILED leave its running sequences as they were."""

    INVALID = "invalid"
    """A request can never run."""
    NO_CAPACITY = "no capacity"
    """Sequences that may not be preempted hold the rows, blocks or adapter slots."""
    ENDED = "ended"
    """The engine's loop has ended."""
    FAILED = "failed"
    """Its step failed, and all of its requests have ended."""


class AdvanceError(Exception):
    """An Advance was refused; ``request_id`` is the request at fault, or None if no single one."""

    def __init__(self, fault: AdvanceFault, cause: str, request_id: int | None = None) -> None:
        super().__init__(cause)
        self.fault = fault
        self.cause = cause
        self.request_id = request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The model and the effective limits of a warmed-up engine, for its clients.

    Limits count tokens. ``max_batch_total_tokens``: blocks x block size; ``grammar``: whether
    requests may have one; ``step_seconds``: the longest step, or 0 if unknown; ``speculate``: most
    draft tokens of a request in a step; ``decoder_start_ids``: an encoder-decoder model's;
    ``max_image_rows``: most tokens of an image; ``nodes``: which stages each has, if several.
    """

    model_id: str
    revision: str
    model_type: str
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int
    block_size: int
    weight_bytes: int
    load_seconds: float
    grammar: bool = False
    quantize: str = ""
    num_shard: int = 1
    step_seconds: float = 0.0
    speculate: int = 0
    decoder_start_ids: tuple[int, ...] = ()
    vision: bool = False
    max_image_rows: int = 0
    kernels: str = ""
    pipeline_parallel_size: int = 1
    nodes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> EngineInfo:
        """The inverse of :func:`dataclasses.asdict`, through JSON too, which has no tuples."""
        lists = ("eos_token_ids", "decoder_start_ids", "nodes")
        return cls(**{**fields, **{name: tuple(fields.get(name, ())) for name in lists}})
