"""What OpenAI's routes share: paths, ids, usage, finish reasons, log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any, cast

import msgspec

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.schemas.openai import CompletionParameters, StreamOptions
from tgi_cli.router.api.schemas.openai_answers import (
    CompletionDetails,
    GenerationTimings,
    PromptDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tgi_cli.router.generation.deltas import Token
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.prompt_logprobs import INLINE_SCORES, encoded_rows
from tgi_cli.router.http import errors
from tgi_cli.router.http.endpoint import Endpoint, Handler, Operation
from tgi_cli.router.http.error_styles import openai_body
from tgi_cli.router.state import RouterState, leads
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import TextWorkers

GENERATION = Operation(tag="OpenAI", errors=(404,), generates=True)

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}

_TOKENS = 128
"""Tokens whose log-probabilities are rendered at once."""

_encode = msgspec.json.Encoder().encode


def v1_endpoints(
    path: str, handler: Handler, operation: Operation, method: str = "POST"
) -> list[Endpoint]:
    """The endpoint under /v1, and without it for clients whose base URL lacks it."""
    return [Endpoint(prefix + path, handler, operation, method=method) for prefix in ("/v1", "")]


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields that every object of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, request: CompletionParameters, state: RouterState) -> Identity:
        """Generate an id."""
        return cls(
            f"{prefix}-{uuid.uuid4().hex}",
            int(time.time()),
            state.model_name(request.model),
            state.fingerprint,
        )

    def fields(self) -> dict[str, Any]:
        """Keyword arguments for the complete answer."""
        return asdict(self)

    def head(self, kind: str) -> bytes:
        """The start of a chunk, up to and including the key ``choices``."""
        return (
            b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":'
            % (
                _encode(self.id),
                _encode(kind),
                self.created,
                _encode(self.model),
                _encode(self.system_fingerprint),
            )
        )


class StreamUsage(Enum):
    """Which chunks of a stream have the usage."""

    NONE = auto()
    """``include_usage: false``."""
    DEFAULT = auto()
    """Without options: none in chats; in text completions the last of each choice, as in TGI."""
    LAST = auto()
    """``include_usage: true``: a chunk without choices at the end."""
    EACH = auto()
    """``continuous_usage_stats``: every chunk that of its choice, and the one at the end."""

    @classmethod
    def of(cls, options: StreamOptions | None) -> StreamUsage:
        """Read the request's options."""
        if options is None or options.include_usage is None:
            return cls.DEFAULT
        if not options.include_usage:
            return cls.NONE
        return cls.EACH if options.continuous_usage_stats else cls.LAST

    @property
    def at_end(self) -> bool:
        """Whether the stream ends with a chunk that has the usage alone."""
        return self in (StreamUsage.LAST, StreamUsage.EACH)


def usage_of(generations: Sequence[Generation]) -> Usage:
    """Token counts of all prompts and samples; a prompt counts once for all of its samples."""
    prompts = leads(generations)
    prompt = sum(lead.prompt_tokens for lead in prompts)
    completion = sum(generation.generated_tokens for generation in generations)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(
            cached_tokens=sum(lead.cached_tokens for lead in prompts)
        ),
        completion_tokens_details=CompletionDetails(
            reasoning_tokens=sum(generation.reasoning_tokens for generation in generations),
            accepted_prediction_tokens=sum(one.drafts.accepted_prediction for one in generations),
            rejected_prediction_tokens=sum(one.drafts.rejected_prediction for one in generations),
        ),
    )


def timings_of(generations: Sequence[Generation]) -> GenerationTimings:
    """llama.cpp's ``timings`` so far. Tokens of several sequences, which run at the same time, are
    summed; their times are those of the slowest."""
    prompts = leads(generations)
    cached = sum(lead.cached_tokens for lead in prompts)
    prompt = sum(lead.prompt_tokens for lead in prompts) - cached
    predicted = sum(generation.generated_tokens for generation in generations)
    prompt_ms = 1e3 * max(lead.timings.prompt for lead in prompts)
    predicted_ms = 1e3 * max(generation.timings.decode for generation in generations)
    timings = GenerationTimings(
        cache_n=cached,
        prompt_n=prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / prompt if prompt else 0.0,
        prompt_per_second=1e3 * prompt / prompt_ms if prompt_ms else 0.0,
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / predicted if predicted else 0.0,
        predicted_per_second=1e3 * predicted / predicted_ms if predicted_ms else 0.0,
    )
    drafted = sum(generation.drafts.drafted for generation in generations)
    if drafted:
        timings.draft_n = drafted
        timings.draft_n_accepted = sum(generation.drafts.accepted for generation in generations)
    return timings


def spelled(token_id: int, text: str, as_ids: bool) -> str:
    """A token's text, or ``token_id:N`` for vLLM's ``return_tokens_as_token_ids``."""
    return f"token_id:{token_id}" if as_ids else text


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[Token],
    top_tokens: Sequence[Sequence[Token]],
    as_ids: bool = False,
) -> list[TokenLogprob]:
    """``logprobs.content`` for some tokens; ``bytes`` is exact even within a character."""
    content: list[TokenLogprob] = []
    for index, token in enumerate(tokens):
        top = top_tokens[index] if top_tokens else ()
        content.append(
            TokenLogprob(
                token=spelled(token.id, token.text, as_ids),
                logprob=token.logprob,
                bytes=list(tokenizer.token_bytes(token.id)),
                top_logprobs=[
                    TopLogprob(
                        token=spelled(other.id, other.text, as_ids),
                        logprob=other.logprob,
                        bytes=list(tokenizer.token_bytes(other.id)),
                    )
                    for other in top
                ],
            )
        )
    return content


async def chat_report(
    workers: TextWorkers,
    tokenizer: Tokenizer,
    tokens: Sequence[Token],
    top_tokens: Sequence[Sequence[Token]],
    as_ids: bool,
) -> list[TokenLogprob]:
    """As :func:`chat_logprobs`; a worker thread renders and encodes long reports."""

    def report(start: int, end: int | None) -> list[TokenLogprob]:
        return chat_logprobs(tokenizer, tokens[start:end], top_tokens[start:end], as_ids)

    if len(tokens) * (1 + len(top_tokens[0] if top_tokens else ())) <= INLINE_SCORES:
        return report(0, None)
    rows = chain.from_iterable(
        report(start, start + _TOKENS) for start in range(0, len(tokens), _TOKENS)
    )
    content = b"[%b]" % await workers.run(encoded_rows, rows)
    return cast("list[TokenLogprob]", msgspec.Raw(content))


def fail_stream(error: errors.ApiError) -> bytes:
    """An error in the middle of a /v1 stream, and its end."""
    return b"data: " + openai_body(error) + b"\n\n" + DONE
