"""Bodies of OpenAI's chat and text completions, and of vLLM's adapter routes.

https://platform.openai.com/docs/api-reference/chat and .../completions. Every optional field may
be null. Fields of other servers keep their names and meanings; those that cannot be honoured
are in :mod:`tgi_cli.router.api.schemas.refused`. Other unknown keys are ignored.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tgi_cli.router import bounds
from tgi_cli.router.api.schemas.refused import RefusedParameters
from tgi_cli.router.bounds import (
    BadWords,
    Choices,
    Json,
    JsonObject,
    LogitBias,
    LogitBiasPairs,
    Name,
    Prompts,
    Seed,
    Signed32,
    Signed64,
    Stops,
    StopString,
    Text,
    TokenIds,
    ToolCalls,
)


class StreamOptions(msgspec.Struct, kw_only=True):
    """``include_usage`` adds a last chunk with the usage, vLLM's ``continuous_usage_stats`` adds it
    to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ImageUrl(msgspec.Struct, kw_only=True):
    """The URL of an image: ``data:``, or where the server fetches them, ``http:`` or ``https:``.

    ``detail`` is ``auto``, ``low``, ``high`` or ``original``.
    """

    url: Text
    detail: Name | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message: ``text``, or for vision-language models ``image_url``.

    The URL of an image may be a string, with ``detail`` beside it, as in responses.
    """

    type: Name
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | ImageUrl | None = None
    detail: Name | None = None


ContentParts = Annotated[list[ContentPart], Meta(max_length=bounds.PARTS)]


class Prediction(msgspec.Struct, kw_only=True):
    """What the answer is expected to resemble, such as a file that is being edited; the type is
    ``content``. It makes the answer faster, and does not change it."""

    type: Name = "content"
    content: Text | ContentParts


class SharedParameters(RefusedParameters, kw_only=True):
    """Parameters of all of OpenAI's APIs, with those of other servers.

    ``repeat_penalty`` (llama.cpp), ``min_new_tokens`` (SGLang) and ``truncate`` (TGI) are other
    names. ``grammar`` is TGI's object or llama.cpp's text; ``json_schema``, ``regex`` and ``ebnf``
    are llama.cpp's and SGLang's.
    """

    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: StopString | Stops | None = None
    logit_bias: LogitBias | LogitBiasPairs | None = None
    top_k: Signed64 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    do_sample: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Signed64 | None = None
    min_new_tokens: Signed64 | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Signed64 | None = None
    truncate: Signed64 | None = None
    watermark: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    adapter_id: Name | None = None
    priority: Signed32 | None = None
    cache_salt: Name | None = None
    grammar: JsonObject | Text | None = None
    json_schema: JsonObject | Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structured_outputs: JsonObject | None = None
    guided_json: JsonObject | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None


class CompletionParameters(SharedParameters, kw_only=True):
    """Parameters of chats and text completions.

    ``max_new_tokens`` (TGI) and ``n_predict`` (llama.cpp; below 0: up to the context's end) are
    other names of ``max_tokens``. ``timings_per_token`` (llama.cpp) adds ``timings`` to the answer
    and to each chunk.
    """

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Signed32 | None = None
    max_tokens: Signed64 | None = None
    max_completion_tokens: Signed64 | None = None
    max_new_tokens: Signed64 | None = None
    n_predict: Signed64 | None = None
    top_n_tokens: Signed64 | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    response_format: JsonObject | None = None
    prediction: Prediction | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation.

    ``tool_calls`` are those of answers, or TGI's, whose arguments are objects.
    """

    role: Name
    content: Text | ContentParts | None = None
    name: Name | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None


class Function(msgspec.Struct, kw_only=True):
    """A function; ``arguments`` is TGI's old name of ``parameters``."""

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    arguments: JsonObject | None = None
    strict: bool | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A tool that takes text.

    ``format`` is ``{"type": "text"}`` or ``{"type": "grammar", "grammar": {"syntax",
    "definition"}}`` with the syntax ``lark`` or ``regex``.
    """

    name: Name
    description: Text | None = None
    format: JsonObject | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool: ``function`` or ``custom``."""

    type: Name = "function"
    function: Function | None = None
    custom: CustomTool | None = None


Messages = Annotated[list[ChatMessage], Meta(max_length=bounds.MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=bounds.TOOLS)]


class ChatReasoning(msgspec.Struct, kw_only=True):
    """OpenRouter's object: an effort, or the most tokens of reasoning.

    ``exclude`` leaves it out of the answer; ``enabled: false`` is the effort ``none``.
    """

    effort: Name | None = None
    max_tokens: Signed64 | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class ChatRequest(CompletionParameters, kw_only=True):
    """The body of ``/v1/chat/completions``.

    ``tool_choice`` is ``auto``, ``none``, ``required``, a tool's name or an object around it, or
    ``{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}``.
    ``echo`` prepends the last message to an answer that continues it. ``thinking_token_budget``
    (vLLM) and ``thinking_budget_tokens`` (llama.cpp) are the most tokens of reasoning; -1 means any
    number.
    """

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Signed64 | None = None
    echo: bool | None = None
    tools: Tools | None = None
    tool_choice: Name | JsonObject | None = None
    tool_prompt: Text | None = None
    parallel_tool_calls: bool | None = None
    functions: Json = None
    function_call: Json = None
    reasoning_effort: Name | None = None
    reasoning: ChatReasoning | None = None
    thinking_token_budget: Signed64 | None = None
    thinking_budget_tokens: Signed64 | None = None
    include_reasoning: bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: Json = None
    prompt_cache_key: Text | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(CompletionParameters, kw_only=True):
    """The body of ``/v1/completions``; ``return_full_text`` is TGI's name of ``echo``."""

    prompt: Text | Prompts
    logprobs: Signed64 | None = None
    echo: bool | None = None
    return_full_text: bool | None = None
    best_of: Signed32 | None = None
    suffix: Text | None = None


Address = Annotated[str, Meta(max_length=bounds.ADDRESS_CHARACTERS)]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of ``/v1/load_lora_adapter``; ``load_inplace`` replaces one of the same name."""

    lora_name: Name = ""
    lora_path: Address = ""
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: Name = ""
