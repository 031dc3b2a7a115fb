"""OpenAI's bodies, as its clients send and check them.

https://platform.openai.com/docs/api-reference/chat and .../completions. Unknown keys are
ignored, and every optional field may be null. Beyond OpenAI's own fields stand those that
servers of open models have in common (``top_k``, ``min_p``, ``repetition_penalty`` ...).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

Signed32 = Annotated[int, msgspec.Meta(gt=-(1 << 31), lt=1 << 31)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """``include_usage``: a last chunk without choices tells the token counts."""

    include_usage: bool | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """What both request bodies have in common; the last six by the names that vLLM gave them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | list[float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: Signed32 | None = None
    cache_salt: str | None = None
    prompt_logprobs: Any = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message; text is the only kind that these models take."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation.

    ``tool_calls`` are as answers have them; TGI's, whose arguments are objects, are taken too.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """What a tool does, and the JSON schema of its arguments; ``arguments`` is TGI's old name."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Something the model may call; functions are the only kind."""

    type: str = "function"
    function: Function | None = None


class ChatRequest(Sampling, kw_only=True):
    """The body of ``/v1/chat/completions``.

    ``tool_choice`` is ``auto``, ``none``, ``required``, a function's name or an object around it.
    """

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tool_prompt: str | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of ``/v1/load_lora_adapter``; ``load_inplace`` replaces one of the same name."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: str = ""


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token that could have been, and the bytes that it stands for."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token that was, and what else could have been."""

    token: str
    logprob: float
    bytes: list[int] | None
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
    """What the prefix cache spared."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function's name, and its arguments as JSON text: what the model wrote."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model wants made."""

    id: str
    type: str = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer of a chat; ``reasoning_content`` and ``reasoning`` are two names of one text."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer, and why it ended."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The whole answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation; ``finish_reason`` is null while it goes on."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer of ``/v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
