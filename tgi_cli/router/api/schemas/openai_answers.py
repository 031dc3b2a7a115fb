"""Answers of OpenAI's chat and text completions, their chunks, lists of models and errors.

Streams write chunks by hand, and errors and models are dictionaries: their types describe them in
the API's document, and a test holds the routes to it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class TopLogprob(msgspec.Struct, kw_only=True, gc=False):
    """A likely token and its bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True, gc=False):
    """A generated token, its bytes and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """``logprobs`` of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """``logprobs`` of a text completion: parallel lists; offsets count characters.

    The first token of an echoed prompt has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptDetails(msgspec.Struct, kw_only=True):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, kw_only=True):
    """Details of the completions' tokens.

    Those of reasoning are without its markers. Tokens of the prediction are accepted if they are
    part of the completion, and rejected if they were verified and are not; the latter are, unlike
    OpenAI's, no part of ``completion_tokens``.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class GenerationTimings(msgspec.Struct, kw_only=True):
    """llama.cpp's ``timings``: tokens, milliseconds and rates of the prompt and of the answer.

    ``cache_n`` tokens of the prompt were cached, ``prompt_n`` were computed. Rates and times per
    token are 0 where nothing was computed. ``draft_n`` draft tokens were verified, if any.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function's name, and its arguments as the JSON text that the model wrote."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct, kw_only=True):
    """The custom tool's name, and the text that the model wrote for it."""

    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model requests, of a function or a custom tool."""

    id: str
    type: str = "function"
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer of a chat; ``reasoning_content`` and ``reasoning`` are two names of one text."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer and its finish reason."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The complete answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    timings: GenerationTimings | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation; ``finish_reason`` is null until it ends."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """The complete answer of ``/v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: GenerationTimings | UnsetType = UNSET


class OpenAIError(msgspec.Struct, kw_only=True):
    """OpenAI's description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(msgspec.Struct, kw_only=True):
    """OpenAI's errors, with TGI's ``error_type``."""

    error: OpenAIError
    error_type: str


class Modalities(msgspec.Struct, kw_only=True):
    """What the model reads and writes, under OpenRouter's names."""

    modality: str = "text->text"
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[str, ...] = ("text",)


class ModelCard(msgspec.Struct, kw_only=True):
    """A model or an adapter; the latter has its folder and its base.

    The fields are those of OpenAI and of Anthropic. The context length has vLLM's and OpenRouter's
    names; ``max_tokens`` are the most of an answer.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str
    owned_by: str
    display_name: str
    lifecycle: Literal["active"] = "active"
    max_model_len: int
    context_length: int
    max_input_tokens: int
    max_tokens: int
    architecture: Modalities
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FunctionDelta(msgspec.Struct, kw_only=True):
    """The change of a call; only the first has the name."""

    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(msgspec.Struct, kw_only=True):
    """The change of a custom tool's call; only the first has the name."""

    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The change of a call; only the first has the id and the type."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """The change of a message; only the first has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One answer's part of a chunk; ``finish_reason`` is null until it ends."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """An event of ``/v1/chat/completions``; the last with ``include_usage`` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    timings: GenerationTimings | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    """An event of ``/v1/completions``; the last of a choice has its usage."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None
    timings: GenerationTimings | UnsetType = UNSET
