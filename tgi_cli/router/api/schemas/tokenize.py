"""Bodies of ``/tokenize`` and ``/detokenize`` of vLLM and llama.cpp.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, and the server's README of
https://github.com/ggml-org/llama.cpp. TGI's form of ``/tokenize`` is in
:mod:`tgi_cli.router.api.schemas.tgi`.
"""

from __future__ import annotations

import msgspec

from tgi_cli.router.api.schemas.openai import Messages, Tools
from tgi_cli.router.bounds import DetokenizedIds, JsonObject, Name, Text


class TokenizePromptRequest(msgspec.Struct, kw_only=True):
    """vLLM's form for a text; adds special tokens by default."""

    model: Name | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeMessagesRequest(msgspec.Struct, kw_only=True):
    """vLLM's form for a conversation, which the chat template renders."""

    model: Name | None = None
    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: JsonObject | None = None


class TokenizeContentRequest(msgspec.Struct, kw_only=True):
    """llama.cpp's form; adds no special tokens by default."""

    content: Text
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """vLLM's answer; ``token_strs`` are the entries of the vocabulary, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(msgspec.Struct, kw_only=True):
    """A token and its text, or its bytes if they are not valid text."""

    id: int
    piece: str | list[int]


class TokenizeContentAnswer(msgspec.Struct, kw_only=True):
    """llama.cpp's answer."""

    tokens: list[int | TokenPiece]


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``/detokenize``."""

    model: Name | None = None
    tokens: DetokenizedIds


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class Version(msgspec.Struct, kw_only=True):
    """The answer of ``/version``."""

    version: str
