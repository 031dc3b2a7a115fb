"""The checks of every request to the engine, whatever interface it comes from."""

from __future__ import annotations

from enum import Enum
from itertools import chain
from typing import Protocol

from tgi_cli.config import DecoderFacts
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import EngineInfo, GenerationRequest
from tgi_cli.engine.prompt_images import PromptImages, validate_images
from tgi_cli.sampling.params import MAX_TOKEN_IDS

_MAX_STOP_IDS = 2 * MAX_TOKEN_IDS
"""Stop token ids of the request and of the model."""
_MAX_SALT_BYTES = 4096
_MAX_MARKER_IDS = 64
"""Token ids of all markers of a thinking budget."""


class LengthLimits(Protocol):
    """The limits on the tokens of one request; :class:`EngineInfo` has them, among others."""

    @property
    def max_input_tokens(self) -> int: ...

    @property
    def max_total_tokens(self) -> int: ...


class LengthFault(Enum):
    """What is wrong with the length of a request."""

    EMPTY_PROMPT = "empty prompt"
    TOTAL_TOO_LONG = "total too long"
    PROMPT_TOO_LONG = "prompt too long"
    NO_NEW_TOKENS = "no new tokens"


class LengthError(ValueError):
    """A request has too many or too few tokens."""

    def __init__(self, fault: LengthFault, cause: str) -> None:
        super().__init__(cause)
        self.fault = fault


def validate_length(prompt_tokens: int, max_new_tokens: int, limits: LengthLimits) -> None:
    """Check the length of a request, in TGI's order. Raises LengthError."""
    if not prompt_tokens:
        raise LengthError(LengthFault.EMPTY_PROMPT, "the prompt has no tokens")
    if prompt_tokens + max_new_tokens > limits.max_total_tokens:
        cause = (
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new tokens are more than "
            f"max_total_tokens ({limits.max_total_tokens})"
        )
        raise LengthError(LengthFault.TOTAL_TOO_LONG, cause)
    if prompt_tokens > limits.max_input_tokens:
        cause = (
            f"the prompt of {prompt_tokens} tokens is longer than max_input_tokens "
            f"({limits.max_input_tokens})"
        )
        raise LengthError(LengthFault.PROMPT_TOO_LONG, cause)
    if max_new_tokens < 1:
        raise LengthError(LengthFault.NO_NEW_TOKENS, "max_new_tokens must be at least 1")


def validate_for_decoder(request: GenerationRequest, decoder: DecoderFacts) -> None:
    """Check a request for an encoder-decoder model. Raises ValueError."""
    if decoder.max_input_tokens is not None and len(request.prompt_ids) > decoder.max_input_tokens:
        raise ValueError(f"the encoder takes {decoder.max_input_tokens} tokens")
    if request.computes_whole_prompt:
        raise ValueError("an encoder gives its tokens neither log-probabilities nor logits")
    forced = {decoder.first_id, decoder.last_id, request.first_id} != {None}
    if request.return_generation_logits and forced:
        raise ValueError("the request or the generation config forces tokens, which have no logits")


def validate_for_engine(request: GenerationRequest, config: SchedulerConfig) -> None:
    """Check that a request can run, except for its adapter and its grammar.

    Raises:
        ValueError: it never can.
    """
    decoder = config.decoder
    length = len(request.prompt_ids) + (decoder is not None)
    validate_length(length, request.max_new_tokens, config)
    if decoder is not None:
        validate_for_decoder(request, decoder)
    elif request.first_id is not None:
        raise ValueError("only answers of encoder-decoder models begin with a given token")
    if request.thinking is not None and request.return_generation_logits:
        raise ValueError("forced tokens have no logits, so a thinking budget excludes them")
    if request.images:
        if config.encoder is None:
            raise ValueError("this model takes no images")
        validate_images(request)
    if request.images or config.whole_prompts:
        _validate_room(PromptImages(request, config.whole_prompts), config)


def _validate_room(images: PromptImages, config: SchedulerConfig) -> None:
    """Check that a step can encode the images, and compute the tokens that must not be split."""
    held = 0 if config.encoder is None else config.encoder.cache_rows
    for unit in images.units:
        rows = sum(images.inputs[index].num_rows for index in unit.images)
        if rows > held:
            raise ValueError(f"images of {rows} tokens are more than can be encoded ({held})")
    most = config.max_batch_prefill_tokens
    if images.longest_whole > most:
        raise ValueError(
            f"{images.longest_whole} tokens attend to each other and are computed at once, "
            f"which is more than max_batch_prefill_tokens ({most})"
        )


def validate_fork(request: GenerationRequest, source: GenerationRequest) -> None:
    """Check that a request is another sample of ``source``. Raises ValueError."""
    if (source.prompt_ids, source.cache_salt, source.images) != (
        request.prompt_ids,
        request.cache_salt,
        request.images,
    ):
        raise ValueError(f"fork_of {request.fork_of} is a request of another prompt")
    if source.adapter_id != request.adapter_id:
        raise ValueError(f"fork_of {request.fork_of} is a request of another adapter")


def validate_request(request: GenerationRequest, info: EngineInfo) -> None:
    """Check a request that comes from outside the engine's process.

    Raises:
        ValueError: the engine cannot run it, or it would cost too much memory.
    """
    validate_length(len(request.prompt_ids), request.max_new_tokens, info)
    validate_images(request)
    sampling = request.sampling
    marker_ids = () if request.thinking is None else request.thinking.token_ids
    token_ids = chain(
        _text_ids(request),
        (token_id for token_id, _ in sampling.logit_bias),
        sampling.allowed_token_ids,
        *sampling.bad_words,
        marker_ids,
        request.prediction,
        () if request.first_id is None else (request.first_id,),
    )
    if max(token_ids, default=0) >= info.vocab_size:
        raise ValueError(f"a token id is not below the vocabulary's size ({info.vocab_size})")
    if len(request.stop_token_ids) > _MAX_STOP_IDS:
        raise ValueError(f"more than {_MAX_STOP_IDS} stop token ids")
    if len(marker_ids) > _MAX_MARKER_IDS:
        raise ValueError(f"a thinking budget with markers of more than {_MAX_MARKER_IDS} tokens")
    if len(request.prediction) > info.max_total_tokens:
        raise ValueError(f"a prediction of more than {info.max_total_tokens} tokens")
    if max(len(request.cache_salt), len(request.tenant)) > _MAX_SALT_BYTES:
        raise ValueError(f"a cache salt or a tenant of more than {_MAX_SALT_BYTES} bytes")
    if max(sampling.top_logprobs, request.prompt_logprobs or 0) > info.vocab_size:
        raise ValueError(
            f"more log-probabilities than the vocabulary has tokens ({info.vocab_size})"
        )


def _text_ids(request: GenerationRequest) -> list[int] | tuple[int, ...]:
    """The prompt without image tokens, whose ids may lie beyond the vocabulary."""
    if not request.images:
        return request.prompt_ids
    ids = list(request.prompt_ids)
    for image in reversed(request.images):
        for start, count in reversed(image.spans):
            del ids[start : start + count]
    return ids
