"""TGI's own bodies: ``/``, ``/generate``, ``/generate_stream``, ``/tokenize``, ``/info`` ...

Unknown keys are ignored and null is accepted where TGI accepts it: for optional numbers and
objects, not for the booleans, ``stop`` or ``parameters`` itself. Ranges for which TGI has
an error message of its own are declared here for the API's document only;
:mod:`tgi_cli.router.generation.validation` checks them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgi_cli.router.api.schemas.openai import ContentParts
from tgi_cli.router.bounds import Json, Name, Signed32, Stops, Text, Unsigned, Unsigned32
from tgi_cli.router.generation.deltas import Token

Reason = Literal["length", "eos_token", "stop_sequence"]


def _doc(description: str, **schema: float) -> Meta:
    """A field's description, and its range if validation checks that in TGI's words."""
    return Meta(description=description, extra_json_schema=schema)


_SHARE = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}


class GenerateParameters(msgspec.Struct, kw_only=True):
    """Parameters of generation, with the defaults of an empty object."""

    best_of: Annotated[
        Unsigned | None, _doc("Samples to choose the likeliest of; without seed.", minimum=1)
    ] = None
    temperature: Annotated[float | None, _doc("Divides the logits.", exclusiveMinimum=0)] = None
    repetition_penalty: Annotated[
        float | None, _doc("Divides the logits of known tokens; 1 is off.", exclusiveMinimum=0)
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _doc("Subtracted from logits, times the token's share so far.", minimum=-2, maximum=2),
    ] = None
    top_k: Annotated[Signed32 | None, _doc("Sample among the k likeliest.", minimum=1)] = None
    top_p: Annotated[
        float | None, _doc("Sample among the likeliest of this total probability.", **_SHARE)
    ] = None
    typical_p: Annotated[
        float | None, _doc("Sample among the most typical of this total probability.", **_SHARE)
    ] = None
    do_sample: Annotated[bool, _doc("Sample; otherwise greedy.")] = False
    max_new_tokens: Annotated[
        Unsigned32 | None, _doc("Limit of tokens. Default: up to the context's end.", minimum=1)
    ] = None
    return_full_text: Annotated[bool | None, _doc("Prepend the prompt to the text.")] = None
    stop: Annotated[Stops, _doc("Strings that end the text, and are part of it.")] = []
    truncate: Annotated[Unsigned | None, _doc("Last prompt tokens to use.", minimum=1)] = None
    watermark: Annotated[bool, _doc("Watermark the text (arXiv:2301.10226).")] = False
    details: Annotated[bool, _doc("Answer with ``details``.")] = False
    decoder_input_details: Annotated[
        bool, _doc("Report the prompt's tokens and log-probabilities in ``details.prefill``.")
    ] = False
    seed: Annotated[Unsigned | None, _doc("Seed of the random numbers.")] = None
    top_n_tokens: Annotated[
        Unsigned32 | None, _doc("Report the n likeliest tokens at each position.")
    ] = None
    grammar: Json = None
    adapter_id: Annotated[Name | None, _doc("Name of a LoRA adapter.")] = None
    full_text: Annotated[
        bool, _doc("In a stream, each event's ``token.text`` is the whole text so far.")
    ] = False
    src_lang: Annotated[
        Name | None, _doc("Language of the prompt, of models that translate, as its code.")
    ] = None
    tgt_lang: Annotated[
        Name | None, _doc("Language of the answer, of models that translate, as its code.")
    ] = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body of ``/generate``: samples without ``parameters``, is greedy with empty ones.

    ``inputs`` may have images, for vision-language models: in Markdown, ``![](URL)``, or as a list
    of parts (MindIE).
    """

    inputs: Text | ContentParts
    parameters: GenerateParameters = msgspec.field(
        default_factory=lambda: GenerateParameters(do_sample=True)
    )

    @property
    def text(self) -> str:
        """The prompt as one text; images of a list are no part of it."""
        if isinstance(self.inputs, str):
            return self.inputs
        return "".join(part.text or "" for part in self.inputs)


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


class SequenceDetails(msgspec.Struct, kw_only=True):
    """Details of every complete sample."""

    finish_reason: Reason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class BestOfSequence(SequenceDetails, kw_only=True):
    """A sample that was not the best."""

    generated_text: str


class Details(SequenceDetails, kw_only=True):
    """``details`` of a whole answer."""

    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/generate``, and the element of that of ``/``."""

    generated_text: str
    translation_text: str | UnsetType = UNSET
    """The same, of ``/`` and an encoder-decoder model: clients for translation read it."""
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
    """A token of ``/tokenize`` and the span of characters that it encodes.

    Tokens that the tokenizer adds have an empty text.
    """

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/chat_tokenize``: the rendered conversation and its tokens."""

    tokenize_response: list[SimpleToken]
    templated_text: str


class Sleeping(msgspec.Struct):
    """The answer of ``/is_sleeping``."""

    is_sleeping: bool


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
    """Set if adapters are enabled; TGI has no such field."""
