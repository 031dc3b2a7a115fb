"""What a session refuses before the engine gets it."""

from __future__ import annotations

from itertools import chain

from tgi_cli.engine.messages import EngineInfo, GenerationRequest
from tgi_cli.sampling.params import MAX_TOKEN_IDS

_MAX_STOP_IDS = 2 * MAX_TOKEN_IDS
"""The request's and the model's own."""
_MAX_SALT_BYTES = 4096


def problem_of(request: GenerationRequest, info: EngineInfo) -> str:
    """Why the engine must not get this request; empty if it may."""
    prompt = len(request.prompt_ids)
    if not prompt:
        return "the prompt has no tokens"
    sampling = request.sampling
    special = chain(
        (token_id for token_id, _ in sampling.logit_bias),
        sampling.allowed_token_ids,
        *sampling.bad_words,
    )
    if max(max(request.prompt_ids), max(special, default=0)) >= info.vocab_size:
        return f"a token id is not below the vocabulary's size ({info.vocab_size})"
    if request.max_new_tokens < 1:
        return "max_new_tokens must be at least 1"
    if prompt > info.max_input_tokens:
        return f"{prompt} prompt tokens are more than max_input_tokens {info.max_input_tokens}"
    if prompt + request.max_new_tokens > info.max_total_tokens:
        return (
            f"{prompt} prompt tokens and {request.max_new_tokens} new ones are more than "
            f"max_total_tokens {info.max_total_tokens}"
        )
    if len(request.stop_token_ids) > _MAX_STOP_IDS:
        return f"more than {_MAX_STOP_IDS} stop token ids"
    if len(request.cache_salt) > _MAX_SALT_BYTES:
        return f"a cache salt of more than {_MAX_SALT_BYTES} bytes"
    if max(sampling.top_logprobs, request.prompt_logprobs or 0) > info.vocab_size:
        return f"more log-probabilities than the vocabulary has tokens ({info.vocab_size})"
    return ""
