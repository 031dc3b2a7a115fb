"""Options of a call of the Python API, and the engine's requests for it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

from tgi_cli.engine.logits_processor import LogitsProcessor
from tgi_cli.engine.messages import EngineInfo, GenerationRequest, ImageInput
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.engine.validation import LengthError, validate_length
from tgi_cli.llm.images import ModelImages, image_part
from tgi_cli.sampling.params import MAX_TOKEN_IDS, SamplingParams
from tgi_cli.text.grammar.checker import token_setup
from tgi_cli.text.grammar.compile import Compiler
from tgi_cli.text.grammar.grammar import GrammarError, parse_response_format
from tgi_cli.text.grammar.tokens import SpecialTokens
from tgi_cli.text.images import ImagePart
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.vision.prompts import ImagePrompt

Grammar = str | Mapping[str, Any]
OnePrompt = str | Sequence[int] | Mapping[str, Any]
Prompts = OnePrompt | Sequence[OnePrompt]

GREEDY = SamplingParams(temperature=0.0)

_PRIORITIES = range(-(1 << 63), 1 << 63)


class EngineSettings(TypedDict, total=False):
    """Settings of an engine: those of ``tgi serve``, with the same defaults, but for one.

    Attributes:
        dtype: ``float32``, ``bfloat16`` or ``float16``. Default: depends on the device.
        max_input_tokens: Longest prompt. Default: as the model and the memory allow.
        max_total_tokens: Most tokens of a request, the prompt included. Default: the same.
        max_batch_prefill_tokens: Prompt tokens computed in one step.
        max_prefill_delay: Milliseconds by which prompts may lengthen a step. Default: no limit.
        max_batch_total_tokens: Tokens in the KV cache. Default: as many as fit.
        max_batch_size: Most requests that run at once.
        batching: See :class:`tgi_cli.engine.config.Batching`.
        capacity_policy: See :class:`tgi_cli.engine.config.CapacityPolicy`.
        waiting_served_ratio: See :class:`tgi_cli.engine.config.SchedulerConfig`.
        max_waiting_tokens: See :class:`tgi_cli.engine.config.SchedulerConfig`.
        prefix_caching: Compute common prefixes of prompts once.
        kv_cache_dir: Folder in which KV blocks are kept, too, for later runs. Default: none.
        kv_cache_dir_size: Most bytes of its files. Default: 10 GiB.
        kv_offloading_size: Bytes of the host's memory for KV blocks that a GPU evicts.
        kv_cache_dtype: ``auto`` (as the weights), ``fp8_e4m3fn`` or ``fp8_e5m2``.
        quantize: How to quantize plain weights on loading, as ``int8``; see ``--quantize``.
        quantize_head: Quantize the output head to 8-bit integers.
        quantize_head_bits: Quantize the output head to 8 bits, or to 4 (nf4).
        quantize_activations: Round activations to 8 bits for products with integer weights.
        num_shard: Processes that share the model: a GPU each, or the cores of the CPU.
        pipeline_parallel_size: Stages of the model's layers, in ``num_shard`` processes each.
        speculate: Most draft tokens of a request in a step. Default: 7 on a CPU, 0 on a GPU.
        speculative_model: Weights that draft tokens, a folder or an id on the hub: a smaller model
            (best of the same vocabulary), or heads made for the model.
        max_loras: LoRA adapters that share a batch. Default: 4 if adapters are named, else 0.
        max_cpu_loras: LoRA adapters in the CPU's memory.
        max_lora_rank: Highest rank of a LoRA adapter.
    """

    dtype: str | None
    max_input_tokens: int | None
    max_total_tokens: int | None
    max_batch_prefill_tokens: int | None
    max_prefill_delay: int
    max_batch_total_tokens: int | None
    max_batch_size: int | None
    batching: str
    capacity_policy: str
    waiting_served_ratio: float | None
    max_waiting_tokens: int | None
    prefix_caching: bool
    kv_cache_dir: Path | None
    kv_cache_dir_size: int | None
    kv_offloading_size: int | None
    kv_cache_dtype: str
    quantize: str | None
    quantize_head: bool
    quantize_head_bits: int | None
    quantize_activations: bool
    num_shard: int | None
    pipeline_parallel_size: int
    speculate: int | None
    speculative_model: str | None
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None


class GenerationKeywords(TypedDict, total=False):
    """The fields of :class:`GenerationOptions` as keyword arguments."""

    max_new_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    best_of: int | None
    logits_processors: Sequence[LogitsProcessor]
    client_id: int | None
    prompt_logprobs: int | None
    return_context_logits: bool
    return_generation_logits: bool
    priority: int
    timeout_seconds: float | None
    add_special_tokens: bool
    adapter: str | Sequence[str | None] | None
    grammar: Grammar | None
    thinking_token_budget: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Keyword arguments of ``generate``, ``chat`` and ``stream``.

    Attributes:
        max_new_tokens: Most generated tokens. None: up to ``max_total_tokens``.
        stop: Strings that end the text; not part of it.
        stop_token_ids: Further ids that end it; part of ``token_ids``.
        ignore_eos: Continue after the model's own stop ids.
        n: Continuations per prompt, which is computed once. The first has the seed of the
            sampling parameters; the seeds of the others follow from it, as over HTTP
            (:func:`tgi_cli.sampling.params.sample_seed`).
        best_of: Generate this many and return the n with the highest mean log-probability.
        logits_processors: See :class:`tgi_cli.engine.messages.LogitsProcessor`; they run on the
            engine's thread. If one raises, its request ends.
        client_id: Passed to the logits processors.
        prompt_logprobs: Return the log-probability of every prompt token, and this number of the
            likeliest alternatives.
        return_context_logits: Return the raw logits of the prompt: 4 x V bytes per token.
        return_generation_logits: Return the raw logits of generated tokens.
        priority: Higher values are served first.
        timeout_seconds: Time from submission; the tokens generated by then are returned.
        add_special_tokens: Add the tokenizer's special tokens to prompts that are text.
        adapter: Name of a loaded LoRA adapter, for all prompts or one for each. Default: the base
            model.
        grammar: Grammar of the text: ``{"type": "json_schema", "json_schema": {"schema": ...}}``
            and OpenAI's other response formats; TGI's ``{"type": "json", "value": schema}`` and
            ``{"type": "regex", "value": ...}``; ``{"type": "grammar", "grammar": Lark}``; or a
            JSON text in llguidance's own form. The text ends where nothing may follow, even with
            ``ignore_eos``.
        thinking_token_budget: Most tokens of reasoning; then its closing marker is forced. None:
            any number. Only for models whose reasoning is between added tokens.

    Raises:
        ValueError: A value is out of range, or ``return_generation_logits`` is combined with a
            budget, whose forced tokens have no logits.
    """

    max_new_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    client_id: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    priority: int = 0
    timeout_seconds: float | None = None
    add_special_tokens: bool = True
    adapter: str | Sequence[str | None] | None = None
    grammar: Grammar | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        new_tokens = self.max_new_tokens
        checks = (
            (new_tokens is None or new_tokens >= 1, "max_new_tokens must be at least 1"),
            (self.n >= 1, "n must be at least 1"),
            (self.best_of is None or self.best_of >= self.n, "best_of must be at least n"),
            ((self.prompt_logprobs or 0) >= 0, "prompt_logprobs must be 0 or positive"),
            (
                len(self.stop_token_ids) <= MAX_TOKEN_IDS,
                f"stop_token_ids takes up to {MAX_TOKEN_IDS} ids",
            ),
            (self.priority in _PRIORITIES, "priority must be a signed 64-bit number"),
            (
                self.timeout_seconds is None or self.timeout_seconds > 0,
                "timeout_seconds must be positive",
            ),
            (
                (self.thinking_token_budget or 0) >= 0,
                "thinking_token_budget must be 0 or positive",
            ),
            (
                self.thinking_token_budget is None or not self.return_generation_logits,
                "tokens that a thinking_token_budget forces have no logits: do without "
                "return_generation_logits",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def samples(self) -> int:
        """Number of continuations to generate per prompt."""
        return self.best_of or self.n


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its index in the call, its text or None if it came as ids, its ids and images."""

    index: int
    text: str | None
    ids: tuple[int, ...]
    images: tuple[ImageInput, ...] = ()


def read_prompts(
    prompts: Prompts,
    tokenizer: Tokenizer,
    add_special_tokens: bool,
    info: EngineInfo,
    images: ModelImages | None = None,
) -> list[Prompt]:
    """Tokenize the prompts of a call together.

    Args:
        images: Reads images. Default: prompts may not have any.

    Raises:
        ValueError: The model does not have a token id, or takes no images, or not these.
        TypeError: A prompt is neither text, nor a list of ids, nor ``{"prompt", "images"}``.
    """
    each: list[OnePrompt]
    if isinstance(prompts, str | Mapping) or (len(prompts) and isinstance(prompts[0], Integral)):
        each = [prompts]  # type: ignore[list-item]
    else:
        each = list(prompts)  # type: ignore[arg-type]
    texts = [prompt for prompt in each if isinstance(prompt, str)]
    # In one call: the library uses all cores for a batch.
    encoded = iter(
        tokenizer.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if texts
        else ()
    )
    seen = [_with_images(index, one) for index, one in enumerate(each) if isinstance(one, Mapping)]
    if seen and images is None:
        raise ValueError("prompts may not have images here")
    pictured = iter(images.encode(seen, add_special_tokens) if images is not None and seen else ())
    read = []
    for index, prompt in enumerate(each):
        if isinstance(prompt, str):
            read.append(Prompt(index, prompt, tuple(next(encoded).ids)))
        elif isinstance(prompt, Mapping):
            found = next(pictured)
            read.append(Prompt(index, prompt["prompt"], tuple(found.ids), found.images))
        else:
            try:
                ids = tuple(map(operator.index, prompt))
            except TypeError:
                raise TypeError(f"prompt {index} must be a text or a list of token ids") from None
            read.append(Prompt(index, None, ids))
    for prompt_read in read:
        _check_ids(prompt_read, info)
    return read


def _with_images(index: int, prompt: Mapping[str, Any]) -> tuple[str, list[ImagePart]]:
    """The text and the images of a prompt that is a mapping."""
    text, given = prompt.get("prompt"), prompt.get("images", ())
    if not isinstance(text, str) or set(prompt) - {"prompt", "images"}:
        raise TypeError(f"prompt {index} must have the keys `prompt`, a text, and `images`")
    single = isinstance(given, str | bytes) or not isinstance(given, Sequence)
    return text, [image_part(image) for image in ((given,) if single else given)]


def _check_ids(prompt: Prompt, info: EngineInfo) -> None:
    low = min(prompt.ids, default=0)
    high = ImagePrompt(list(prompt.ids), prompt.images).highest_id
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"prompt {prompt.index}: the model has no token {wrong} (0 to {info.vocab_size - 1})"
        )


def new_tokens_of(prompt: Prompt, max_new_tokens: int | None, info: EngineInfo) -> int:
    """``max_new_tokens``, or as many tokens as fit after the prompt if None.

    Raises:
        ValueError: The prompt, or the prompt and its output, have too many or too few tokens.
    """
    if max_new_tokens is None:
        max_new_tokens = max(info.max_total_tokens - len(prompt.ids), 1)
    try:
        validate_length(len(prompt.ids), max_new_tokens, info)
    except LengthError as error:
        raise ValueError(f"prompt {prompt.index}: {error}") from None
    return max_new_tokens


def per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int, info: EngineInfo
) -> list[SamplingParams]:
    """The sampling parameters of each prompt. Default: greedy.

    Raises:
        ValueError: Their number differs, or the model does not have a token id.
    """
    if sampling is None:
        return [GREEDY] * count
    if isinstance(sampling, SamplingParams):
        each = [sampling] * count
    else:
        each = list(sampling)
        if len(each) != count:
            raise ValueError(f"{len(each)} sampling parameters for {count} prompts")
    for params in {id(params): params for params in each}.values():
        biased = (i for i, _ in params.logit_bias)
        for i in chain(biased, params.allowed_token_ids, *params.bad_words):
            if not 0 <= i < info.vocab_size:
                raise ValueError(f"the model has no token {i} (0 to {info.vocab_size - 1})")
    return each


def adapter_names(adapter: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """The adapter of each prompt. Raises ValueError if their number differs."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise ValueError(f"{len(adapter)} adapters for {count} prompts")
    return list(adapter)


def requests_of(
    prompt: Prompt,
    sampling: SamplingParams,
    options: GenerationOptions,
    info: EngineInfo,
    ids: Iterator[int],
    adapter_id: int = 0,
    grammar: str | None = None,
    thinking: ThinkingBudget | None = None,
) -> list[GenerationRequest]:
    """The engine's requests for one prompt: its first sample, and forks of it.

    Raises:
        ValueError: The prompt and its output have too many tokens.
    """
    own_stops = () if options.ignore_eos else info.eos_token_ids
    first = GenerationRequest(
        request_id=next(ids),
        prompt_ids=prompt.ids,
        images=prompt.images,
        sampling=sampling,
        max_new_tokens=new_tokens_of(prompt, options.max_new_tokens, info),
        stop_token_ids=frozenset((*own_stops, *options.stop_token_ids)),
        priority=options.priority,
        timeout_seconds=options.timeout_seconds,
        prompt_logprobs=options.prompt_logprobs,
        logits_processors=tuple(options.logits_processors),
        client_id=options.client_id,
        return_context_logits=options.return_context_logits,
        return_generation_logits=options.return_generation_logits,
        adapter_id=adapter_id,
        grammar=grammar,
        thinking=thinking,
    )
    return [first, *(first.fork(next(ids), sample) for sample in range(1, options.samples))]


def read_grammar(
    grammar: Grammar | None, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
) -> str | None:
    """A grammar in the engine's form; one in JSON text is in that form already.

    Compiled in the caller's thread, however long that takes: the grammar is the caller's own.

    Raises:
        ValueError: The grammar is invalid or has an unsupported part, which is named.
    """
    if grammar is None or isinstance(grammar, str):
        return grammar
    try:
        parsed = parse_response_format(grammar, "grammar")
        if parsed is None:
            return None
        tokens = SpecialTokens(**token_setup(tokenizer, eos_token_ids))
        return Compiler(tokens).compile(parsed.form)
    except GrammarError as error:
        raise ValueError(f"grammar: {error}") from error
