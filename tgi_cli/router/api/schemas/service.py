"""Bodies that routes write without a type of their own: errors, models, events of /v1 streams.

They are what the API's document says of them; a test holds the routes to it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tgi_cli.router.api.schemas.openai import ChatLogprobs, CompletionChoice, Usage


class ErrorResponse(msgspec.Struct, kw_only=True):
    """TGI's errors."""

    error: str
    error_type: str


class OpenAIError(msgspec.Struct, kw_only=True):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(msgspec.Struct, kw_only=True):
    """OpenAI's errors, with TGI's ``error_type`` on top."""

    error: OpenAIError
    error_type: str


class ModelCard(msgspec.Struct, kw_only=True):
    """A name that requests may say; an adapter has its files and its base beside it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class FunctionDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call; the name comes with the call's first alone."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call; its id and type come with the call's first alone."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a message; the role comes with the first alone."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One answer's part in a chunk; ``finish_reason`` is null while it goes on."""

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


class CompletionChunk(msgspec.Struct, kw_only=True):
    """An event of ``/v1/completions``; the last of a choice counts its tokens."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None
