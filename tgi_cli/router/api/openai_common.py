"""What the /v1 routes have in common: ids, usage, finish reasons, log probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import cast

import msgspec

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.schemas.openai import (
    CompletionParameters,
    PromptDetails,
    StreamOptions,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tgi_cli.router.generation.deltas import Token
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.prompt_logprobs import INLINE_SCORES, encoded_rows
from tgi_cli.router.http import errors
from tgi_cli.router.state import RouterState, leads
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import TextWorkers

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}

_TOKENS = 128
"""Whose log-probabilities are spelled at once."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Identity:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, request: CompletionParameters, state: RouterState) -> Identity:
        """A fresh id. TGI's clients send the model name "tgi" for whatever is served."""
        model = request.model if request.model and request.model != "tgi" else None
        return cls(
            f"{prefix}-{uuid.uuid4().hex}",
            int(time.time()),
            model or state.config.model_id,
            state.fingerprint,
        )

    def head(self, kind: str) -> bytes:
        """The start of a stream's event, up to and including the key ``choices``."""
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
    """Which chunks of a stream count tokens; one without choices at the end does but in two."""

    SILENT = auto()
    """``include_usage: false``: none."""
    OPEN = auto()
    """Nothing was asked: none in chats; of a text completion, TGI's, the last of each choice."""
    LAST = auto()
    EACH = auto()
    """``continuous_usage_stats``: all, each those of its choice."""

    @classmethod
    def of(cls, options: StreamOptions | None) -> StreamUsage:
        """As asked."""
        if options is None or options.include_usage is None:
            return cls.OPEN
        if not options.include_usage:
            return cls.SILENT
        return cls.EACH if options.continuous_usage_stats else cls.LAST

    @property
    def at_end(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return self in (StreamUsage.LAST, StreamUsage.EACH)


def usage_of(generations: Sequence[Generation]) -> Usage:
    """Token counts of all prompts together; each counts once, and every token of its samples."""
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
    )


def spelled(token_id: int, text: str, as_ids: bool) -> str:
    """A token in a report of log-probabilities: its text, or what vLLM says to tell texts apart
    that are alike (``return_tokens_as_token_ids``)."""
    return f"token_id:{token_id}" if as_ids else text


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[Token],
    top_tokens: Sequence[Sequence[Token]],
    as_ids: bool = False,
) -> list[TokenLogprob]:
    """``logprobs.content`` of some tokens; ``bytes`` is right also within a character."""
    content: list[TokenLogprob] = []
    for place, token in enumerate(tokens):
        top = top_tokens[place] if top_tokens else ()
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
    """As :func:`chat_logprobs`; a long report is made by a worker, encoded already."""

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
    return b"data: " + errors.openai_body(error) + b"\n\n" + DONE
