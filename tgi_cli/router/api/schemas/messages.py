"""Anthropic's Messages: bodies, answers and events.

https://docs.anthropic.com/en/api/messages. Every optional field may be null. Unknown keys are
ignored, as the API ignores those of betas that it does not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tgi_cli.router import bounds
from tgi_cli.router.bounds import Json, JsonObject, Name, Signed32, Signed64, Stops, Text


class Block(msgspec.Struct, kw_only=True):
    """A part of a message; ``type`` determines which of the fields it has.

    ``content`` is that of a tool's result, of a search result, or of a system message within a
    turn. Results of Anthropic's own tools are objects, too.
    """

    type: Name
    text: Text | None = None
    thinking: Text | None = None
    signature: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: JsonObject | None = None
    tool_use_id: Name | None = None
    content: Text | Blocks | JsonObject | None = None
    is_error: bool | None = None
    tool_name: Name | None = None
    tool: Json = None
    title: Text | None = None
    context: Text | None = None
    source: Text | JsonObject | None = None


Blocks = Annotated[list[Block], Meta(max_length=bounds.PARTS)]


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation; ``role`` is ``user``, ``assistant`` or ``system``."""

    role: Name
    content: Text | Blocks


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool of the client, or of Anthropic if its ``type`` is not ``custom``.

    A tool with ``defer_loading`` is offered once a ``tool_reference`` has named it.
    """

    name: Name | None = None
    type: Name | None = None
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: Annotated[list[JsonObject], Meta(max_length=bounds.PARTS)] | None = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """``auto``, ``any``, ``tool`` with a ``name``, or ``none``."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether and how long to think; ``display`` is ``summarized`` or ``omitted``."""

    type: Name
    budget_tokens: Signed64 | None = None
    display: Name | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """The effort, and the JSON schema of the answer: ``{"type": "json_schema", "schema"}``."""

    effort: Name | None = None
    format: JsonObject | None = None


InputMessages = Annotated[list[InputMessage], Meta(max_length=bounds.MESSAGES)]
MessageTools = Annotated[list[MessageTool], Meta(max_length=bounds.TOOLS)]


class MessagesInput(msgspec.Struct, kw_only=True):
    """What makes the prompt of a message.

    ``output_format`` is an older name of ``output_config.format``.
    """

    model: Name
    messages: InputMessages
    system: Text | Blocks | None = None
    tools: MessageTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonObject | None = None
    mcp_servers: Json = None


class CountTokensRequest(MessagesInput, kw_only=True):
    """The body of ``/v1/messages/count_tokens``."""


class MessagesRequest(MessagesInput, kw_only=True):
    """The body of ``/v1/messages``; ``max_tokens: 0`` only computes the prompt."""

    max_tokens: Signed64
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Signed32 | None = None


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """The text of an answer. ``citations`` is absent: some clients read null as an error."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning; clients send it back with its signature."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model requests."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingUsage(msgspec.Struct, kw_only=True):
    """Details of the output's tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts; the prompt's length is the sum of the first three.

    Filling the prefix cache is not an act of its own: ``cache_creation_input_tokens`` is 0.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingUsage | msgspec.UnsetType = msgspec.UNSET
    service_tier: Literal["standard"] = "standard"


class DeltaUsage(msgspec.Struct, kw_only=True):
    """Token counts at the end of a stream; all are totals."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingUsage


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class Message(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class StopDelta(msgspec.Struct, kw_only=True):
    """Why a stream ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(msgspec.Struct, kw_only=True, tag_field="type", tag="message_start"):
    """The first event of a stream: the message without content."""

    message: Message


class BlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: AnswerBlock


class BlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of a block: ``text_delta``, ``thinking_delta``, ``signature_delta`` or
    ``input_json_delta``, each with its text in a field of its own."""

    index: int
    delta: dict[str, str]


class BlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    """The end of the message, with its usage."""

    delta: StopDelta
    usage: DeltaUsage


class MessageStop(msgspec.Struct, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


class PingEvent(msgspec.Struct, kw_only=True, tag_field="type", tag="ping"):
    """Keeps an idle connection open."""


class AnthropicError(msgspec.Struct, kw_only=True):
    """Anthropic's description of an error."""

    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """Anthropic's errors, and the last event of a stream that failed."""

    error: AnthropicError
    request_id: str | None


MessageEvent = (
    MessageStart
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | PingEvent
    | AnthropicErrorResponse
)


class TokenCount(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
