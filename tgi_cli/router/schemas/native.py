"""TGI's own bodies: ``/``, ``/generate``, ``/generate_stream``, ``/info``.

Unknown keys are ignored and null is accepted where TGI accepts it: for optional numbers and
objects, not for the booleans, ``stop`` or ``parameters`` itself.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from tgi_cli.router.delta import Token

Unsigned = Annotated[int, msgspec.Meta(ge=0)]
Unsigned32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Signed32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class GenerateParameters(msgspec.Struct, kw_only=True):
    """How to generate. The defaults are those of an object that is present but says nothing."""

    best_of: Unsigned | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Signed32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: Unsigned32 | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: Unsigned | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: Unsigned | None = None
    top_n_tokens: Unsigned32 | None = None
    grammar: Any = None
    adapter_id: str | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Without ``parameters`` TGI samples; with them, even empty, it is greedy."""

    inputs: str
    parameters: GenerateParameters = msgspec.field(
        default_factory=lambda: GenerateParameters(do_sample=True)
    )


class CompatRequest(GenerateRequest, kw_only=True):
    """The body of ``/``."""

    stream: bool = False


class PrefillToken(msgspec.Struct):
    """A token of the prompt; the first has no logprob."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(msgspec.Struct, kw_only=True):
    """A sample that was not the best."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(msgspec.Struct, kw_only=True):
    """``details`` of a whole answer."""

    finish_reason: str
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

    finish_reason: str
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
