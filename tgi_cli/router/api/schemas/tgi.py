"""TGI's own bodies: ``/``, ``/generate``, ``/generate_stream``, ``/tokenize``, ``/info`` ...

Unknown keys are ignored and null is accepted where TGI accepts it: for optional numbers and
objects, not for the booleans, ``stop`` or ``parameters`` itself. Ranges for which TGI has
an error message of its own are only declared here (``extra_json_schema``);
:mod:`tgi_cli.router.generation.validation` checks them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgi_cli.router.bounds import Json, Name, Signed32, Stops, Text, Unsigned, Unsigned32
from tgi_cli.router.generation.deltas import Token

Reason = Literal["length", "eos_token", "stop_sequence"]

_POSITIVE = {"exclusiveMinimum": 0}
_SHARE = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}


class GenerateParameters(msgspec.Struct, kw_only=True):
    """How to generate. The defaults are those of an object that is present but says nothing."""

    best_of: Annotated[
        Unsigned | None,
        Meta(
            description="Generate so many and answer the likeliest; needs sampling and no seed.",
            extra_json_schema={"minimum": 1},
        ),
    ] = None
    temperature: Annotated[
        float | None, Meta(description="Divides the logits.", extra_json_schema=_POSITIVE)
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Meta(
            description="Divides logits of tokens of the prompt and the text; 1 is off.",
            extra_json_schema=_POSITIVE,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Meta(
            description="Taken off a token's logit, times its share of all tokens so far.",
            extra_json_schema={"minimum": -2, "maximum": 2},
        ),
    ] = None
    top_k: Annotated[
        Signed32 | None,
        Meta(description="Sample among the k likeliest.", extra_json_schema={"minimum": 1}),
    ] = None
    top_p: Annotated[
        float | None,
        Meta(
            description="Sample among the likeliest that together have this probability.",
            extra_json_schema=_SHARE,
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        Meta(
            description="Sample among the most typical that together have this probability.",
            extra_json_schema=_SHARE,
        ),
    ] = None
    do_sample: Annotated[bool, Meta(description="Sample; else take the likeliest.")] = False
    max_new_tokens: Annotated[
        Unsigned32 | None,
        Meta(
            description="At most so many; none: up to the context's end.",
            extra_json_schema={"minimum": 1},
        ),
    ] = None
    return_full_text: Annotated[
        bool | None, Meta(description="Put the prompt in front of the text.")
    ] = None
    stop: Annotated[
        Stops, Meta(description="Texts that end the text; the one that did is left in it.")
    ] = []
    truncate: Annotated[
        Unsigned | None,
        Meta(
            description="Keep the last so many tokens of the prompt.",
            extra_json_schema={"minimum": 1},
        ),
    ] = None
    watermark: Annotated[bool, Meta(description="Mark the text (arXiv:2301.10226).")] = False
    details: Annotated[bool, Meta(description="Answer with ``details``.")] = False
    decoder_input_details: Annotated[
        bool, Meta(description="The prompt's tokens and log-probabilities in ``details.prefill``.")
    ] = False
    seed: Annotated[Unsigned | None, Meta(description="What the randomness follows from.")] = None
    top_n_tokens: Annotated[
        Unsigned32 | None, Meta(description="The n likeliest tokens in place of each.")
    ] = None
    grammar: Json = None
    adapter_id: Annotated[Name | None, Meta(description="Name of a LoRA adapter.")] = None
    full_text: Annotated[
        bool,
        Meta(description="In a stream, each event's ``token.text`` is the whole text so far."),
    ] = False


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Without ``parameters`` TGI samples; with them, even empty, it is greedy."""

    inputs: Text
    parameters: GenerateParameters = msgspec.field(
        default_factory=lambda: GenerateParameters(do_sample=True)
    )


class CompatRequest(GenerateRequest, kw_only=True):
    """The body of ``/``."""

    stream: bool = False


class ErrorResponse(msgspec.Struct, kw_only=True):
    """TGI's errors."""

    error: str
    error_type: str


class PrefillToken(msgspec.Struct, gc=False):
    """A token of the prompt; the first has no logprob."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(msgspec.Struct, kw_only=True):
    """A sample that was not the best."""

    generated_text: str
    finish_reason: Reason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(msgspec.Struct, kw_only=True):
    """``details`` of a whole answer."""

    finish_reason: Reason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/generate``, and the element of that of ``/``."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(msgspec.Struct, kw_only=True):
    """``details`` of a stream's last event."""

    finish_reason: Reason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(msgspec.Struct, kw_only=True, gc=False):
    """One event of a native stream."""

    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class SimpleToken(msgspec.Struct, gc=False):
    """A token of ``/tokenize``: the characters of the text, from and up to, that it stands for.

    Tokens that stand for none, which the tokenizer adds, have an empty text.
    """

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/chat_tokenize``: the rendered conversation and its tokens."""

    tokenize_response: list[SimpleToken]
    templated_text: str


class Info(msgspec.Struct, kw_only=True):
    """The answer of ``/info``."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    lora_adapters: list[str] | UnsetType = UNSET
    """Where adapters are on; TGI has no such field."""
