"""What a request may ask for: TGI's rules in TGI's words, and OpenAI's meanings on /v1.

Every parameter that is known but cannot be acted on is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.router import errors
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.defaults import SamplingDefaults
from tgi_cli.router.schemas.native import GenerateParameters, GenerateRequest
from tgi_cli.router.schemas.openai import Sampling
from tgi_cli.router.spec import GenerationSpec
from tgi_cli.router.structured import native_grammar, openai_grammar
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.bad_words import word_ids
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer

T = TypeVar("T")

_PIECE = 1024
"""TGI validates at most so many new tokens, and generates up to the context's end."""

_UINT64 = (1 << 64) - 1


_MOST_SECONDS = 1_000_000.0


def request_timeout(request: Request) -> float | None:
    """Seconds that the client gives the whole request: its header. Raises ApiError."""
    given = request.headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_SECONDS:
        raise errors.validation(
            f"the header `x-request-timeout` must be a number of seconds, > 0 and <= "
            f"{_MOST_SECONDS:.0f}. Given: {given}",
            "x-request-timeout",
        )
    return seconds


def fit_length(input_length: int, max_new_tokens: int | None, info: EngineInfo) -> int:
    """How many tokens may follow a prompt of ``input_length`` tokens.

    As TGI, a wish that goes beyond the context's end is fulfilled up to it when there is room
    for 1024 tokens, and refused when there is not. Raises ApiError.
    """
    if input_length == 0:
        raise errors.validation("`inputs` cannot be empty", "prompt")
    room = max(info.max_total_tokens - input_length, 0)
    asked = room if max_new_tokens is None else max_new_tokens
    if input_length + min(asked, _PIECE) > info.max_total_tokens:
        raise errors.validation(
            f"`inputs` tokens + `max_new_tokens` must be <= {info.max_total_tokens}. "
            f"Given: {input_length} `inputs` tokens and {asked} `max_new_tokens`",
            "max_tokens",
        )
    if input_length > info.max_input_tokens:
        raise errors.validation(
            f"`inputs` must have less than {info.max_input_tokens} tokens. Given: {input_length}",
            "prompt",
        )
    return min(asked, room)


def native_spec(
    request: GenerateRequest, config: RouterConfig, info: EngineInfo, stream: bool
) -> GenerationSpec:
    """What a native request asks for. Raises ApiError."""
    asked = request.parameters
    best_of = _best_of(asked, config, stream)
    penalty = asked.frequency_penalty or 0.0
    checks: tuple[tuple[bool, str], ...] = (
        (asked.temperature is not None and asked.temperature <= 0,
         "`temperature` must be strictly positive"),
        (asked.repetition_penalty is not None and asked.repetition_penalty <= 0,
         "`repetition_penalty` must be strictly positive"),
        (not -2.0 <= penalty <= 2.0, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (asked.top_p is not None and not 0 < asked.top_p < 1, "`top_p` must be > 0.0 and < 1.0"),
        (asked.typical_p is not None and not 0 < asked.typical_p < 1,
         "`typical_p` must be > 0.0 and < 1.0"),
        (asked.top_k is not None and asked.top_k <= 0, "`top_k` must be strictly positive"),
        (asked.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"),
        (asked.seed is not None and asked.seed > _UINT64,
         "`seed` must be an unsigned 64-bit number"),
    )  # fmt: skip
    for broken, message in checks:
        if broken:
            raise errors.validation(message)
    stops = _stops(asked.stop, config)
    top_n_tokens = _top_n(asked.top_n_tokens or 0, "top_n_tokens", config)
    if not request.inputs:
        raise errors.validation("`inputs` cannot be empty")
    if asked.truncate is not None and not 0 < asked.truncate <= info.max_input_tokens:
        raise errors.validation(
            f"`truncate` must be strictly positive and less than {info.max_input_tokens}. "
            f"Given: {asked.truncate}"
        )
    warped = (
        asked.temperature not in (None, 1.0)
        or asked.top_k is not None
        or asked.top_p is not None
        or asked.typical_p is not None
    )
    sampling = _sampling(
        temperature=(asked.temperature or 1.0) if asked.do_sample or warped else 0.0,
        top_k=asked.top_k or 0,
        top_p=asked.top_p or 1.0,
        typical_p=asked.typical_p or 1.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        # TGI divides the penalty by the length of the sequence; OpenAI's is another one.
        relative_frequency_penalty=penalty,
        watermark=asked.watermark,
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
        top_logprobs=top_n_tokens,
    )
    return GenerationSpec(
        prompt=request.inputs,
        sampling=sampling,
        seed=asked.seed,
        max_new_tokens=asked.max_new_tokens,
        truncate=asked.truncate,
        stops=stops,
        keep_stop=True,
        samples=best_of,
        prompt_logprobs=0 if asked.decoder_input_details else None,
        grammar=native_grammar(asked.grammar),
    )


def _best_of(asked: GenerateParameters, config: RouterConfig, stream: bool) -> int:
    """How many samples, by TGI's rules; and refuse what is not available."""
    best_of = 1 if asked.best_of is None else asked.best_of
    sampling = asked.do_sample or any(
        value is not None
        for value in (asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    )
    checks = (
        (stream and best_of != 1, "`best_of` != 1 is not supported when streaming tokens"),
        (stream and asked.decoder_input_details,
         "`decoder_input_details` == true is not supported when streaming tokens"),
        (not 0 < best_of <= config.max_best_of,
         f"`best_of` must be > 0 and <= {config.max_best_of}. Given: {best_of}"),
        (best_of > 1 and not sampling, "you must use sampling when `best_of` is > 1"),
        (best_of > 1 and asked.seed is not None, "`seed` must not be set when `best_of` > 1"),
    )  # fmt: skip
    for broken, message in checks:
        if broken:
            raise errors.validation(message)
    return best_of


def openai_specs(
    request: Sampling,
    prompts: Sequence[str | tuple[int, ...]],
    config: RouterConfig,
    info: EngineInfo,
    tokenizer: Tokenizer,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    top_logprobs: int,
    add_special_tokens: bool,
) -> list[GenerationSpec]:
    """What a /v1 request asks for, once for each of its prompts. Raises ApiError."""
    if request.n is not None and request.n < 1:
        raise errors.validation("`n` must be strictly positive", "n")
    grammar = openai_grammar(request)
    if request.prompt_logprobs not in (None, False):
        raise errors.unsupported("prompt_logprobs")
    if max_tokens is not None and max_tokens <= 0:
        raise errors.validation("`max_tokens` must be strictly positive", "max_tokens")
    min_tokens = _or(request.min_tokens, 0)
    if min_tokens < 0:
        raise errors.validation("`min_tokens` must be >= 0", "min_tokens")
    stop = request.stop
    stops = _stops([stop] if isinstance(stop, str) else stop or [], config)
    sampling = _sampling(
        temperature=_or(request.temperature, defaults.temperature),
        top_k=max(_or(request.top_k, defaults.top_k), 0),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        typical_p=_or(request.typical_p, defaults.typical_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias, info),
        bad_words=_bad_words(request.bad_words or [], tokenizer, info),
        min_new_tokens=min_tokens,
        top_logprobs=_top_n(top_logprobs, "top_logprobs", config),
    )
    return [
        GenerationSpec(
            prompt=prompt,
            sampling=sampling,
            add_special_tokens=add_special_tokens,
            seed=None if request.seed is None else request.seed & _UINT64,
            max_new_tokens=max_tokens,
            stops=stops,
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=frozenset(
                check_ids(request.stop_token_ids or [], "stop_token_ids", info)
            ),
            samples=_or(request.n, 1),
            # Lower is earlier there, and higher is here.
            priority=-_or(request.priority, 0),
            cache_salt=_or(request.cache_salt, "").encode(),
            grammar=grammar,
        )
        for prompt in prompts
    ]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _sampling(**fields: Any) -> SamplingParams:
    """Its fields checked; ApiError names the one at fault."""
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        message = str(error)
        raise errors.validation(message, message.partition("`")[2].partition("`")[0]) from error


def check_ids(items: Sequence[int], name: str, info: EngineInfo) -> Sequence[int]:
    """Token ids that the model has. Raises ApiError."""
    if any(not 0 <= index < info.vocab_size for index in items):
        raise errors.validation(f"token ids must be >= 0 and < {info.vocab_size}", name)
    return items


def _logit_bias(
    asked: dict[str, float] | list[float] | None, info: EngineInfo
) -> tuple[tuple[int, float], ...]:
    if not asked:
        return ()
    if isinstance(asked, list) or not all(key.isascii() and key.isdigit() for key in asked):
        raise errors.validation(
            "`logit_bias` must map token ids to numbers in [-100, 100]", "logit_bias"
        )
    ids = [int(key[:20]) for key in asked]  # more digits than any vocabulary needs
    check_ids(ids, "logit_bias", info)
    return tuple(zip(ids, asked.values(), strict=True))


def _bad_words(
    words: Sequence[str], tokenizer: Tokenizer, info: EngineInfo
) -> tuple[tuple[int, ...], ...]:
    if not all(word.strip() for word in words):
        raise errors.validation("`bad_words` must not be empty", "bad_words")
    found = dict.fromkeys(ids for word in words for ids in word_ids(tokenizer, word))
    # An id that the model does not have cannot be generated anyway.
    return tuple(ids for ids in found if max(ids) < info.vocab_size)


def _stops(stops: list[str], config: RouterConfig) -> StopStrings:
    if len(stops) > config.max_stop_sequences:
        raise errors.validation(
            f"`stop` supports up to {config.max_stop_sequences} stop sequences. "
            f"Given: {len(stops)}",
            "stop",
        )
    try:
        return StopStrings(stops)
    except ValueError as error:
        raise errors.validation(str(error), "stop") from error


def _top_n(count: int, name: str, config: RouterConfig) -> int:
    if not 0 <= count <= config.max_top_n_tokens:
        raise errors.validation(
            f"`{name}` must be >= 0 and <= {config.max_top_n_tokens}. Given: {count}", name
        )
    return count
