"""Translates /v1 requests into specs: OpenAI's parameters, and those of other servers.

Known parameters that cannot be honoured are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.router.api.schemas.openai import (
    CompletionParameters,
    Prediction,
    SharedParameters,
    StreamOptions,
)
from tgi_cli.router.api.schemas.refused import refuse
from tgi_cli.router.bounds import TOP_LOGPROBS
from tgi_cli.router.generation.sampling_defaults import SamplingDefaults
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.structured_output import openai_grammar
from tgi_cli.router.generation.validation import (
    UINT64,
    VALIDATED_NEW_TOKENS,
    check_ids,
    sampling_params,
    stop_strings,
)
from tgi_cli.router.http import errors
from tgi_cli.router.state import RouterState
from tgi_cli.text.tokenizer import Tokenizer

T = TypeVar("T")

LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict")
_BANNED = -100.0
"""Bias of a token that llama.cpp's ``[id, false]`` bans."""
_LOWEST_PRIORITY = -(1 << 31) + 1
"""Its negation fits in 32 bits."""


def openai_spec(
    request: CompletionParameters,
    state: RouterState,
    *,
    top_logprobs: int,
    add_special_tokens: bool,
    prompt_only: bool = False,
) -> GenerationSpec:
    """The spec of a /v1 request, without its prompt. Raises ApiError.

    Args:
        add_special_tokens: default of the parameter.
        prompt_only: generate nothing.
    """
    config, info, defaults = state.config, state.client.info, state.defaults
    refuse(request)
    check_stream_options(request.stream, request.stream_options)
    if request.n is not None and request.n < 1:
        raise errors.validation("`n` must be strictly positive", "n")
    if request.seed is not None and request.seed > UINT64:
        raise errors.validation("`seed` must be a 64-bit number", "seed")
    grammar = openai_grammar(request)
    length_name, length = requested_length(request)
    if length is not None and length <= 0 and not prompt_only:
        raise errors.validation(f"`{length_name}` must be strictly positive", length_name)
    min_name, min_tokens = one_of(request, "min_tokens", "min_new_tokens")
    if min_tokens is not None and min_tokens < 0:
        raise errors.validation(f"`{min_name}` must be >= 0", min_name)
    penalty_name, penalty = one_of(request, "repetition_penalty", "repeat_penalty")
    stop = request.stop
    stops = stop_strings([stop] if isinstance(stop, str) else stop or [], config)
    bad_words = tuple(request.bad_words or ())
    if not all(word.strip() for word in bad_words):
        raise errors.validation("`bad_words` must not be empty", "bad_words")
    truncate = requested_truncation(request, length, info)
    stop_ids = frozenset(check_ids(request.stop_token_ids or [], "stop_token_ids", info))
    keep_stop = bool(request.include_stop_str_in_output)
    sampling = sampling_params(
        {"repetition_penalty": penalty_name, "min_new_tokens": min_name},
        temperature=_temperature(request, defaults),
        top_k=min(max(_or(request.top_k, defaults.top_k), 0), info.vocab_size),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        typical_p=_or(request.typical_p, defaults.typical_p),
        repetition_penalty=_or(penalty, defaults.repetition_penalty),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias, info),
        min_new_tokens=_or(min_tokens, 0),
        top_logprobs=top_logprobs,
        allowed_token_ids=_allowed(request.allowed_token_ids, info),
        watermark=bool(request.watermark),
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
    )
    return GenerationSpec(
        prompt="",
        sampling=sampling,
        bad_words=bad_words,
        add_special_tokens=_or(request.add_special_tokens, add_special_tokens),
        seed=None if request.seed is None else request.seed & UINT64,
        max_new_tokens=1 if prompt_only else length,
        truncate=truncate,
        stops=stops,
        keep_stop=keep_stop,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_ids,
        shown_ids=_shown_ids(request, stop_ids, keep_stop, info, state.text.tokenizer),
        samples=_or(request.n, 1),
        prompt_only=prompt_only,
        # In vLLM lower is served first, in the engine higher.
        priority=-max(_or(request.priority, 0), _LOWEST_PRIORITY),
        cache_salt=_or(request.cache_salt, "").encode(),
        grammar=grammar,
        prediction=_prediction(request.prediction),
    )


def requested_length(request: CompletionParameters) -> tuple[str, int | None]:
    """The name and value of the limit of new tokens, or None if it is the context's end.

    OpenAI's newer name has precedence over its older one; other names must agree. Raises ApiError.
    """
    names = LENGTHS if request.max_completion_tokens is None else (LENGTHS[0], *LENGTHS[2:])
    name, length = one_of(request, *names)
    if name == "n_predict" and length is not None and length < 0:
        return name, None
    return ("max_tokens" if length is None else name), length


def requested_truncation(
    request: SharedParameters, length: int | None, info: EngineInfo
) -> int | None:
    """The number of a prompt's last tokens to use, or None for all. Raises ApiError.

    vLLM's -1 leaves space for ``length`` new tokens.
    """
    last: int | None
    name, last = one_of(request, "truncate_prompt_tokens", "truncate")
    if last is None:
        return None
    if last == -1 and name == "truncate_prompt_tokens":
        left = info.max_total_tokens - min(length or 1, VALIDATED_NEW_TOKENS)
        return max(min(left, info.max_input_tokens), 1)
    if not 0 < last <= info.max_input_tokens:
        raise errors.validation(
            f"`{name}` must be > 0 and <= {info.max_input_tokens}. Given: {last}", name
        )
    return last


def requested_logprobs(count: int | None, name: str) -> int:
    """The number of likeliest tokens at each position. Raises ApiError."""
    if count is not None and not 0 <= count <= TOP_LOGPROBS:
        raise errors.validation(
            f"`{name}` must be >= 0 and <= {TOP_LOGPROBS}. Given: {count}", name
        )
    return count or 0


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Raise ApiError for invalid options, or options without ``stream``."""
    if options is not None and not stream:
        raise errors.validation(
            "`stream_options` is only allowed when `stream` is true", "stream_options"
        )
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise errors.validation(
            "`continuous_usage_stats` needs `include_usage` to be true", "stream_options"
        )


def one_of(request: SharedParameters, *names: str) -> tuple[str, Any]:
    """The name that is set, and its value. Raises ApiError if two names differ."""
    found = [(name, getattr(request, name)) for name in names]
    given = [each for each in found if each[1] is not None] or found[:1]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise errors.validation(f"`{given[0][0]}` and `{name}` mean the same and differ", name)
    return given[0]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _temperature(request: CompletionParameters, defaults: SamplingDefaults) -> float:
    """0 for TGI's ``do_sample: false``, unless another parameter implies sampling."""
    warped = (request.temperature, request.top_k, request.top_p, request.typical_p)
    if request.do_sample is False and all(value is None for value in warped):
        return 0.0
    return _or(request.temperature, defaults.temperature)


def _logit_bias(
    biases: dict[str, float] | list[tuple[int, float | bool]] | None, info: EngineInfo
) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    if isinstance(biases, list):
        valid = not any(bias is True for _, bias in biases)
        found = {token_id: _BANNED if bias is False else bias for token_id, bias in biases}
    else:
        valid = all(key.isascii() and key.isdigit() for key in biases)
        # More digits than any vocabulary needs.
        found = {int(key[:20]): bias for key, bias in biases.items()} if valid else {}
    if not valid:
        raise errors.validation(
            "`logit_bias` must map token ids to numbers in [-100, 100]", "logit_bias"
        )
    check_ids(list(found), "logit_bias", info)
    return tuple(found.items())


def _allowed(ids: Sequence[int] | None, info: EngineInfo) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not ids:
        raise errors.validation("`allowed_token_ids` must not be empty", "allowed_token_ids")
    return tuple(dict.fromkeys(check_ids(ids, "allowed_token_ids", info)))


def _prediction(prediction: Prediction | None) -> str:
    """The text of OpenAI's predicted output. Raises ApiError."""
    if prediction is None:
        return ""
    if prediction.type != "content":
        raise errors.validation("`prediction.type` must be `content`", "prediction")
    if isinstance(prediction.content, str):
        return prediction.content
    texts = []
    for part in prediction.content:
        if part.type != "text" or part.text is None:
            raise errors.validation(
                f"content of type `{part.type}` is not supported in a prediction", "prediction"
            )
        texts.append(part.text)
    return "".join(texts)


def _shown_ids(
    request: CompletionParameters,
    stop_ids: frozenset[int],
    keep_stop: bool,
    info: EngineInfo,
    tokenizer: Tokenizer,
) -> frozenset[int]:
    """Special tokens and stop ids that are part of the text, by vLLM's rules."""
    shown = tokenizer.special_ids if request.skip_special_tokens is False else frozenset()
    if keep_stop:
        return shown | (stop_ids - tokenizer.special_ids)
    return shown - stop_ids - (frozenset() if request.ignore_eos else set(info.eos_token_ids))
