"""OpenAI's Responses, as far as a stateless server supports them.

https://platform.openai.com/docs/api-reference/responses. Every optional field may be null;
unknown keys are ignored, except those in :mod:`tgi_cli.router.api.schemas.refused`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tgi_cli.router import bounds
from tgi_cli.router.api.schemas.openai import SharedParameters, StreamOptions
from tgi_cli.router.api.schemas.openai_answers import TokenLogprob
from tgi_cli.router.bounds import Items, Json, JsonObject, Name, Names, Signed64, Text

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function, whose fields are not nested in ``function`` as in chats."""

    type: Name
    name: Name | None = None
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """The reasoning effort; summaries are not generated.

    ``max_tokens`` (OpenRouter) are the most tokens of reasoning.
    """

    effort: Name | None = None
    summary: Name | None = None
    max_tokens: Signed64 | msgspec.UnsetType | None = msgspec.UNSET


class TextOptions(msgspec.Struct, kw_only=True):
    """``format`` is a chat's ``response_format``, but with a schema's fields beside ``type``."""

    format: JsonObject | None = None
    verbosity: Name | None = None


FunctionTools = Annotated[list[FunctionTool], Meta(max_length=bounds.TOOLS)]


class ResponsesRequest(SharedParameters, kw_only=True):
    """The body of ``/v1/responses``.

    ``input`` is text, or messages, function calls, their outputs and reasoning, as in answers.
    """

    input: Text | Items
    model: Name | None = None
    instructions: Text | None = None
    max_output_tokens: Signed64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: FunctionTools | None = None
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
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Text | None = None
    conversation: Json = None
    prompt: Json = None


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
    arguments: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText] = []


OutputItem = OutputMessage | FunctionCall | ReasoningItem


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
    """The answer of ``/v1/responses``; the server does not store it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningOptions
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream, with further fields that depend on its type.

    ``response.created``, ``response.in_progress``, ``response.completed``,
    ``response.incomplete`` and ``response.failed`` have the response so far.
    """

    type: str
    sequence_number: int
    response: ResponseObject | msgspec.UnsetType = msgspec.UNSET
