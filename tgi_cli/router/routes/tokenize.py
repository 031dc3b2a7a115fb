"""What the model would be given: ``POST /tokenize`` and ``POST /chat_tokenize``."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.conversation import converse
from tgi_cli.router.http import json_response, parse, read_body, read_json
from tgi_cli.router.routes import vllm
from tgi_cli.router.schemas.native import ChatTokenizeResponse, GenerateRequest, SimpleToken
from tgi_cli.router.schemas.openai import ChatRequest
from tgi_cli.router.state import RouterState, state_of

_GENERATE = msgspec.json.Decoder(GenerateRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)


async def tokenize(request: Request) -> Response:
    """The tokens of a text: TGI's ``inputs``, vLLM's ``prompt`` or ``messages``, or llama.cpp's
    ``content``, each answered in its own form."""
    state = state_of(request)
    raw = await read_body(request, state.config.payload_limit)
    answer = await vllm.tokenize(raw, state)
    if answer is not None:
        return answer
    body = parse(raw, _GENERATE)
    return json_response(await _tokens(state, body.inputs, True))


async def chat_tokenize(request: Request) -> Response:
    """The text that the chat template makes of a conversation, and its tokens."""
    state = state_of(request)
    body = await read_json(request, _CHAT, state.config.payload_limit)
    spec = (await converse(body, state)).spec
    assert isinstance(spec.prompt, str)
    answer = ChatTokenizeResponse(
        tokenize_response=await _tokens(state, spec.prompt, spec.add_special_tokens),
        templated_text=spec.prompt,
    )
    return json_response(answer)


async def _tokens(state: RouterState, text: str, add_special_tokens: bool) -> list[SimpleToken]:
    spans = await state.workers.spans(text, add_special_tokens)
    return [SimpleToken(index, text[start:stop], start, stop) for index, start, stop in spans]


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/chat_tokenize", chat_tokenize, methods=["POST"]),
]
