"""What clients of vLLM and of llama.cpp call beside OpenAI's routes: their forms of
``POST /tokenize``, ``POST /detokenize`` and ``GET /version``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import tgi_cli
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.api.schemas.tokenize import (
    DetokenizeRequest,
    TokenizeContentRequest,
    TokenizeMessagesRequest,
    TokenizePromptRequest,
    TokenPiece,
    Version,
)
from tgi_cli.router.generation.chat_prompt import render_chat
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response, parse, read_json
from tgi_cli.router.state import RouterState, state_of
from tgi_cli.text.tokenizer import Tokenizer

INLINE_IDS = 2048
"""Handled on the event loop itself: 0.3 us an id to decode, and about as much to write."""
_PART = 1 << 12
"""Values that are written in one go: writing holds the interpreter lock, 0.1 us a value."""


class _Keys(msgspec.Struct):
    inputs: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    content: Raw | UnsetType = UNSET


_KEYS = msgspec.json.Decoder(_Keys)
_PROMPT = msgspec.json.Decoder(TokenizePromptRequest)
_MESSAGES = msgspec.json.Decoder(TokenizeMessagesRequest)
_CONTENT = msgspec.json.Decoder(TokenizeContentRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
_encode = msgspec.json.Encoder().encode


async def tokenize(body: bytes, state: RouterState) -> Response | None:
    """The answer to vLLM's and llama.cpp's forms of a body; None: it is TGI's. Raises ApiError."""
    keys = parse(body, _KEYS)
    if keys.inputs is not UNSET:
        return None
    if keys.messages is not UNSET:
        return await _messages(parse(body, _MESSAGES), state)
    if keys.prompt is not UNSET:
        asked = parse(body, _PROMPT)
        await state.adapters.openai(asked.model)
        ids = await state.workers.encode(asked.prompt, asked.add_special_tokens is not False)
        return await _counted(ids, bool(asked.return_token_strs), state)
    if keys.content is not UNSET:
        return await _content(parse(body, _CONTENT), state)
    return None


async def _messages(asked: TokenizeMessagesRequest, state: RouterState) -> Response:
    chat = ChatRequest(
        model=asked.model,
        messages=asked.messages,
        tools=asked.tools,
        add_generation_prompt=asked.add_generation_prompt,
        # Left open, chats go on where the assistant's last message ends, as TGI's; vLLM's do not.
        continue_final_message=bool(asked.continue_final_message),
        chat_template=asked.chat_template,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    await state.adapters.openai(asked.model)
    text = (await render_chat(chat, state)).spec.prompt
    assert isinstance(text, str)
    ids = await state.workers.encode(text, bool(asked.add_special_tokens))
    return await _counted(ids, bool(asked.return_token_strs), state)


async def _content(asked: TokenizeContentRequest, state: RouterState) -> Response:
    if asked.parse_special is False:
        raise errors.unsupported(
            "parse_special", "`parse_special` other than true", "unsupported_value"
        )
    ids = await state.workers.encode(asked.content, bool(asked.add_special))
    read = _piece if asked.with_pieces else None
    return await _answer(len(ids), state, _content_body, ids, read, state.text.tokenizer)


async def _counted(ids: Sequence[int], strings: bool, state: RouterState) -> Response:
    context = state.generator.info.max_total_tokens
    return await _answer(
        len(ids), state, _counted_body, ids, strings, context, state.text.tokenizer
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included: ``prompt`` and ``content`` are the same."""
    state = state_of(request)
    asked = await read_json(request, _DETOKENIZE, state.config.payload_limit)
    await state.adapters.openai(asked.model)
    known = min(state.client.info.vocab_size, state.text.tokenizer.vocab_size)
    if asked.tokens and max(asked.tokens) >= known:
        raise errors.validation(f"token ids must be >= 0 and < {known}", "tokens")
    ids = asked.tokens
    return await _answer(len(ids), state, _text_body, ids, state.text.tokenizer)


async def version(request: Request) -> Response:
    """The version of this server."""
    return json_response(Version(version=tgi_cli.__version__))


async def _answer(
    size: int, state: RouterState, write: Callable[..., list[bytes]], *args: Any
) -> Response:
    """What ``write`` makes of the arguments; off the event loop and in parts if it is much."""
    if size <= INLINE_IDS:
        return Response(b"".join(write(*args)), media_type="application/json")
    written = await state.workers.run(write, *args)

    async def parts() -> AsyncIterator[bytes]:
        for part in written:
            yield part

    return StreamingResponse(parts(), media_type="application/json")


def _text_body(ids: Sequence[int], tokenizer: Tokenizer) -> list[bytes]:
    # The batch call releases the interpreter lock.
    (decoded,) = tokenizer.backend.decode_batch([ids], skip_special_tokens=False)
    text = _encode(decoded)
    return [b'{"prompt":', text, b',"content":', text, b"}"]


def _counted_body(
    ids: Sequence[int], strings: bool, context: int, tokenizer: Tokenizer
) -> list[bytes]:
    told = [b"null"]
    if strings:
        names = {index: tokenizer.backend.id_to_token(index) or "" for index in set(ids)}
        told = _array(ids, names.__getitem__)
    front = b'{"count":%d,"max_model_len":%d,"tokens":' % (len(ids), context)
    return [front, *_array(ids), b',"token_strs":', *told, b"}"]


def _content_body(
    ids: Sequence[int], read: Callable[[int, Tokenizer], TokenPiece] | None, tokenizer: Tokenizer
) -> list[bytes]:
    told = None
    if read is not None:
        told = {index: read(index, tokenizer) for index in set(ids)}.__getitem__
    return [b'{"tokens":', *_array(ids, told), b"}"]


def _piece(index: int, tokenizer: Tokenizer) -> TokenPiece:
    found = tokenizer.token_bytes(index)
    try:
        return TokenPiece(id=index, piece=found.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=index, piece=list(found))


def _array(ids: Sequence[int], told: Callable[[int], Any] | None = None) -> list[bytes]:
    """A JSON array of the ids, or of a value for each; in parts, so that other threads run."""
    parts = [b"["]
    for start in range(0, len(ids), _PART):
        part = ids[start : start + _PART]
        written = _encode(part if told is None else [told(index) for index in part])
        parts.append((b"," if start else b"") + written[1:-1])
    return [*parts, b"]"]


ROUTES = [
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/version", version, methods=["GET"]),
]
