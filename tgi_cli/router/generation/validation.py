"""Validation of requests: TGI's rules with TGI's messages, and checks that all APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.validation import LengthError, LengthFault, validate_length
from tgi_cli.router.api.schemas.tgi import GenerateParameters, GenerateRequest
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.structured_output import tgi_grammar
from tgi_cli.router.http import errors
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.languages import Translation
from tgi_cli.text.stop import StopStrings

VALIDATED_NEW_TOKENS = 1024
"""Most new tokens that TGI validates; it generates up to the end of the context."""

UINT64 = (1 << 64) - 1
NO_NAMES: Mapping[str, str] = MappingProxyType({})

_MOST_SECONDS = 1_000_000.0


def request_timeout(request: Request) -> float | None:
    """The timeout in seconds of the request's header, or None. Raises ApiError."""
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


def fit_length(
    input_length: int, max_new_tokens: int | None, info: EngineInfo, param: str = "prompt"
) -> int:
    """How many tokens may follow a prompt of ``input_length`` tokens.

    As in TGI, more tokens than fit into the context are refused unless 1024 fit. Raises
    ApiError, which names ``param``.
    """
    available = max(info.max_total_tokens - input_length, 0)
    requested = available if max_new_tokens is None else max_new_tokens
    try:
        validate_length(input_length, min(requested, VALIDATED_NEW_TOKENS), info)
    except LengthError as error:
        if error.fault is LengthFault.EMPTY_PROMPT:
            empty = f"`{param}` cannot be empty"
            raise errors.validation(
                "`inputs` cannot be empty", param, openai_message=empty
            ) from None
        too_long = partial(
            errors.context_length,
            param=param,
            context=info.max_total_tokens,
            most=info.max_input_tokens,
            prompt=input_length,
            longest=min(
                info.max_input_tokens,
                info.max_total_tokens - min(requested, VALIDATED_NEW_TOKENS),
            ),
        )
        if error.fault is LengthFault.TOTAL_TOO_LONG:
            raise too_long(
                f"`inputs` tokens + `max_new_tokens` must be <= {info.max_total_tokens}. "
                f"Given: {input_length} `inputs` tokens and {requested} `max_new_tokens`",
                completion=requested if input_length <= info.max_input_tokens else None,
            ) from None
        if error.fault is LengthFault.PROMPT_TOO_LONG:
            raise too_long(
                f"`inputs` must have less than {info.max_input_tokens} tokens. "
                f"Given: {input_length}",
                completion=None,
            ) from None
    return min(requested, available)


def generation_spec(
    request: GenerateRequest, prompt: str, config: RouterConfig, info: EngineInfo, stream: bool
) -> GenerationSpec:
    """The spec of a request of TGI's API. Raises ApiError.

    Args:
        prompt: The text of its ``inputs``, with a placeholder for each image.
    """
    params = request.parameters
    best_of = _best_of(params, config, stream)
    penalty = params.frequency_penalty or 0.0
    checks: tuple[tuple[bool, str], ...] = (
        (params.temperature is not None and params.temperature <= 0,
         "`temperature` must be strictly positive"),
        (params.repetition_penalty is not None and params.repetition_penalty <= 0,
         "`repetition_penalty` must be strictly positive"),
        (not -2.0 <= penalty <= 2.0, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (params.top_p is not None and not 0 < params.top_p < 1, "`top_p` must be > 0.0 and < 1.0"),
        (params.typical_p is not None and not 0 < params.typical_p < 1,
         "`typical_p` must be > 0.0 and < 1.0"),
        (params.top_k is not None and params.top_k <= 0, "`top_k` must be strictly positive"),
        (params.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"),
        (params.seed is not None and params.seed > UINT64,
         "`seed` must be an unsigned 64-bit number"),
    )  # fmt: skip
    for broken, message in checks:
        if broken:
            raise errors.validation(message)
    stops = stop_strings(params.stop, config)
    top_n_tokens = _top_n(params.top_n_tokens or 0, "top_n_tokens", config)
    if not prompt:
        raise errors.validation("`inputs` cannot be empty")
    if params.truncate is not None and not 0 < params.truncate <= info.max_input_tokens:
        raise errors.validation(
            f"`truncate` must be strictly positive and less than {info.max_input_tokens}. "
            f"Given: {params.truncate}"
        )
    cuts = (params.top_k, params.top_p, params.typical_p)
    warped = params.temperature not in (None, 1.0) or cuts != (None, None, None)
    sampling = sampling_params(
        temperature=(params.temperature or 1.0) if params.do_sample or warped else 0.0,
        top_k=params.top_k or 0,
        top_p=params.top_p or 1.0,
        typical_p=params.typical_p or 1.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        # TGI divides the penalty by the length of the sequence, unlike OpenAI.
        relative_frequency_penalty=penalty,
        watermark=params.watermark,
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
        top_logprobs=top_n_tokens,
    )
    return GenerationSpec(
        prompt=prompt,
        sampling=sampling,
        seed=params.seed,
        max_new_tokens=params.max_new_tokens,
        truncate=params.truncate,
        stops=stops,
        keep_stop=True,
        length_first=True,
        samples=best_of,
        prompt_logprobs=0 if params.decoder_input_details else None,
        grammar=tgi_grammar(params.grammar),
        translation=_translation(params),
    )


def _translation(params: GenerateParameters) -> Translation | None:
    if params.src_lang is None and params.tgt_lang is None:
        return None
    return Translation(params.src_lang, params.tgt_lang)


def _best_of(params: GenerateParameters, config: RouterConfig, stream: bool) -> int:
    """Number of samples, by TGI's rules. Raises ApiError."""
    best_of = 1 if params.best_of is None else params.best_of
    set_values = (params.temperature, params.top_k, params.top_p, params.typical_p)
    sampling = params.do_sample or any(value is not None for value in set_values)
    checks = (
        (stream and best_of != 1, "`best_of` != 1 is not supported when streaming tokens"),
        (stream and params.decoder_input_details,
         "`decoder_input_details` == true is not supported when streaming tokens"),
        (not 0 < best_of <= config.max_best_of,
         f"`best_of` must be > 0 and <= {config.max_best_of}. Given: {best_of}"),
        (best_of > 1 and not sampling, "you must use sampling when `best_of` is > 1"),
        (best_of > 1 and params.seed is not None, "`seed` must not be set when `best_of` > 1"),
    )  # fmt: skip
    for broken, message in checks:
        if broken:
            raise errors.validation(message)
    return best_of


def sampling_params(names: Mapping[str, str] = NO_NAMES, **fields: Any) -> SamplingParams:
    """Check sampling parameters. Raises ApiError."""
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        field = str(error).partition("`")[2].partition("`")[0]
        name = names.get(field, field)
        raise errors.validation(str(error).replace(f"`{field}`", f"`{name}`", 1), name) from error


def check_ids(items: Sequence[int], name: str, info: EngineInfo) -> Sequence[int]:
    """Check that the model has the token ids. Raises ApiError."""
    if items and not 0 <= min(items) <= max(items) < info.vocab_size:
        raise errors.validation(f"token ids must be >= 0 and < {info.vocab_size}", name)
    return items


def stop_strings(stops: list[str], config: RouterConfig) -> StopStrings:
    if len(stops) > config.max_stop_sequences:
        most = f"`stop` supports up to {config.max_stop_sequences} stop sequences"
        raise errors.validation(
            f"{most}. Given: {len(stops)}",
            "stop",
            openai_message=f"{most}, as the server's --max-stop-sequences sets. "
            f"Given: {len(stops)}",
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
