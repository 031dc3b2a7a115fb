"""What the /v1 routes have in common: ids, usage, finish reasons, log probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router import errors
from tgi_cli.router.delta import Token
from tgi_cli.router.generation import Generation
from tgi_cli.router.schemas.openai import (
    PromptDetails,
    Sampling,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tgi_cli.router.state import RouterState, leads
from tgi_cli.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Identity:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, request: Sampling, state: RouterState) -> Identity:
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


def include_usage(request: Sampling) -> bool:
    """Whether a stream ends with a chunk of token counts."""
    return bool(request.stream_options and request.stream_options.include_usage)


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


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[Token], top_tokens: Sequence[Sequence[Token]]
) -> list[TokenLogprob]:
    """``logprobs.content`` of some tokens; ``bytes`` is right also within a character."""
    content: list[TokenLogprob] = []
    for place, token in enumerate(tokens):
        top = top_tokens[place] if top_tokens else ()
        content.append(
            TokenLogprob(
                token=token.text,
                logprob=token.logprob,
                bytes=list(tokenizer.token_bytes(token.id)),
                top_logprobs=[
                    TopLogprob(
                        token=other.text,
                        logprob=other.logprob,
                        bytes=list(tokenizer.token_bytes(other.id)),
                    )
                    for other in top
                ],
            )
        )
    return content


def fail_stream(error: errors.ApiError) -> bytes:
    """An error in the middle of a /v1 stream, and its end."""
    return b"data: " + errors.openai_body(error) + b"\n\n" + DONE
