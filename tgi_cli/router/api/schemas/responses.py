"""OpenAI's Responses: the bodies of ``/v1/responses`` and the routes below it.

https://platform.openai.com/docs/api-reference/responses, and what Open Responses requires of every
response (https://www.openresponses.org). Every optional field may be null; unknown keys are
ignored, except those in :mod:`tgi_cli.router.api.schemas.refused`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgi_cli.router import bounds
from tgi_cli.router.api.schemas.openai import SharedParameters, StreamOptions
from tgi_cli.router.api.schemas.openai_answers import TokenLogprob
from tgi_cli.router.bounds import Items, Json, JsonObject, Name, Names, Signed64, Text

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

ResponseTools = Annotated[list[JsonObject], Meta(max_length=bounds.TOOLS)]
"""Tools of the types ``function``, ``custom`` and ``namespace``, and hosted ones."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """The reasoning effort, and whether reasoning is given as a summary.

    ``generate_summary`` is an old name of ``summary``. ``max_tokens`` (OpenRouter) are the most
    tokens of reasoning.
    """

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | UnsetType | None = UNSET
    max_tokens: Signed64 | UnsetType | None = UNSET


class TextOptions(msgspec.Struct, kw_only=True):
    """``format`` is a chat's ``response_format``, but with a schema's fields beside ``type``."""

    format: JsonObject | None = None
    verbosity: Name | None = None


class ResponsesRequest(SharedParameters, kw_only=True):
    """The body of ``/v1/responses``.

    ``input`` is text, or items: messages, calls, their outputs and reasoning, as in answers.
    """

    input: Text | Items | None = None
    model: Name | None = None
    instructions: Text | None = None
    max_output_tokens: Signed64 | None = None
    max_tool_calls: Signed64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: ResponseTools | None = None
    tool_choice: Name | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: JsonObject | None = None
    truncation: Name | None = None
    top_logprobs: Signed64 | None = None
    include: Names | None = None
    metadata: JsonObject | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Name | None = None
    conversation: Json = None
    prompt: Json = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """The body of ``/v1/responses/input_tokens``: what shapes the prompt of a response."""

    input: Text | Items | None = None
    model: Name | None = None
    instructions: Text | None = None
    tools: ResponseTools | None = None
    tool_choice: Name | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: JsonObject | None = None
    truncation: Name | None = None
    previous_response_id: Name | None = None
    conversation: Json = None


class InputTokens(msgspec.Struct, kw_only=True):
    """The length of a response's prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of an answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model requests; its output refers to ``call_id``."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes text; its output refers to ``call_id``."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """The text of reasoning, where the request asks for a summary."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning, in ``summary`` or in ``content``.

    ``encrypted_content`` is the same text in a form that the server reads in later requests.
    """

    id: str
    status: Status
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


OutputItem = OutputMessage | FunctionCall | CustomToolCall | ReasoningItem


class InputDetails(msgspec.Struct, kw_only=True):
    """Details of the input's tokens; writing the prefix cache is free."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Details of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/responses``; ``store`` is whether it can be retrieved."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The answer of ``DELETE /v1/responses/{response_id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of a stored response's input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream, with further fields that depend on its type.

    ``response.created``, ``response.in_progress``, ``response.completed``,
    ``response.incomplete`` and ``response.failed`` have the response so far.
    """

    type: str
    sequence_number: int
    response: ResponseObject | msgspec.UnsetType = msgspec.UNSET
