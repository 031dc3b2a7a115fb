"""What the model would be given: ``POST /tokenize`` and ``POST /chat_tokenize``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tgi_cli.router.api import vllm
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.api.schemas.tgi import ChatTokenizeResponse, GenerateRequest, SimpleToken
from tgi_cli.router.generation.chat_prompt import render_chat
from tgi_cli.router.http.bodies import parse, read_body, read_json
from tgi_cli.router.state import RouterState, state_of
from tgi_cli.text.windowed_encoding import WHOLE_BYTES, Span

_GENERATE = msgspec.json.Decoder(GenerateRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode

_SLICE = 1024
"""Tokens that are encoded in one go, in half a millisecond."""


async def tokenize(request: Request) -> Response:
    """The tokens of a text: TGI's ``inputs``, vLLM's ``prompt`` or ``messages``, or llama.cpp's
    ``content``, each answered in its own form."""
    state = state_of(request)
    raw = await read_body(request, state.config.payload_limit)
    answer = await vllm.tokenize(raw, state)
    if answer is not None:
        return answer
    body = parse(raw, _GENERATE)
    return await _answer(_tokens(state, body.inputs, True), len(body.inputs))


async def chat_tokenize(request: Request) -> Response:
    """The text that the chat template makes of a conversation, and its tokens."""
    state = state_of(request)
    body = await read_json(request, _CHAT, state.config.payload_limit)
    spec = (await render_chat(body, state)).spec
    assert isinstance(spec.prompt, str)
    around = _encode(ChatTokenizeResponse(tokenize_response=[], templated_text=spec.prompt))
    tokens = _tokens(state, spec.prompt, spec.add_special_tokens)
    return await _answer(tokens, len(spec.prompt), *around.split(b"[]", 1))


async def _tokens(state: RouterState, text: str, add_special_tokens: bool) -> AsyncIterator[bytes]:
    """A JSON array of :class:`SimpleToken`: whole, or of long texts some kilobytes at a time."""

    def encoded(spans: list[Span]) -> list[bytes]:
        # Encoding keeps the interpreter from all other threads.
        return [
            _encode(
                [SimpleToken(index, text[start:stop], start, stop) for index, start, stop in some]
            )[1:-1]
            for place in range(0, len(spans), _SLICE)
            if (some := spans[place : place + _SLICE])
        ]

    between = b"["
    async for spans in state.workers.spans(text, add_special_tokens):
        short = len(spans) <= _SLICE
        for piece in encoded(spans) if short else await state.workers.run(encoded, spans):
            yield between
            yield piece
            between = b","
    yield b"[]" if between == b"[" else b"]"


async def _answer(
    tokens: AsyncIterator[bytes], characters: int, front: bytes = b"", behind: bytes = b""
) -> Response:
    """The tokens within ``front`` and ``behind``; those of a long text as they are found."""

    async def pieces() -> AsyncIterator[bytes]:
        yield front
        async for piece in tokens:
            yield piece
        yield behind

    if characters > WHOLE_BYTES // 4:
        return StreamingResponse(pieces(), media_type="application/json")
    whole = b"".join([piece async for piece in pieces()])
    return Response(whole, media_type="application/json")


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/chat_tokenize", chat_tokenize, methods=["POST"]),
]
