"""``POST /tokenize``, ``/chat_tokenize`` and ``/detokenize``, of TGI, vLLM and llama.cpp."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache, partial
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from tgi_cli.router.api.chat import CHAT
from tgi_cli.router.api.schemas import tokenize as schemas
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.api.schemas.tgi import ChatTokenizeResponse, GenerateRequest, SimpleToken
from tgi_cli.router.api.tgi import GENERATE
from tgi_cli.router.generation.chat_prompt import render_chat
from tgi_cli.router.generation.image_parts import native_prompt
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import first_key, parse
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.state import RouterState
from tgi_cli.text.spans import Spans
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.windowed_encoding import WHOLE_BYTES

INLINE_IDS = 2048
"""Longest list handled on the event loop: 0.3 us an id to decode, and about as much to write."""
_PART = 1 << 12
"""Values that are encoded at once: encoding holds the interpreter lock, 0.1 us a value."""
_SLICE = 1024
"""Tokens that are encoded at once, in half a millisecond."""

_TokenValue = Callable[[int], Any]
"""What an answer has for a token id."""

_encode = msgspec.json.Encoder().encode


async def tokenize(context: RequestContext[bytes]) -> Response:
    """The tokens of a text: TGI's ``inputs``, vLLM's ``prompt`` or ``messages``, or llama.cpp's
    ``content``, each answered in its own form."""
    state, body = context.state, context.body
    key = first_key(body, "inputs", "messages", "prompt", "content")
    if key == "messages":
        return await _tokenize_messages(parse(body, schemas.TokenizeMessagesRequest), state)
    if key == "prompt":
        prompt = parse(body, schemas.TokenizePromptRequest)
        await state.adapters.for_openai(prompt.model)
        return await _vllm_answer(
            state, prompt.prompt, prompt.add_special_tokens is not False, prompt.return_token_strs
        )
    if key == "content":
        return await _tokenize_content(parse(body, schemas.TokenizeContentRequest), state)
    inputs = parse(body, GenerateRequest).inputs
    written, images = native_prompt(inputs, state.generator.images)
    text, rows = await state.generator.images.write(written, images, "inputs")
    return await _tgi_answer(_tgi_tokens(state, text, True, rows), len(text))


async def chat_tokenize(context: RequestContext[ChatRequest]) -> Response:
    """The text that the chat template makes of a conversation, and its tokens."""
    state = context.state
    spec = (await render_chat(context.body, state)).spec
    assert isinstance(spec.prompt, str)
    text, rows = await state.generator.images.write(spec.prompt, spec.images, "messages")
    around = _encode(ChatTokenizeResponse(tokenize_response=[], templated_text=text))
    tokens = _tgi_tokens(state, text, spec.add_special_tokens, rows)
    return await _tgi_answer(tokens, len(text), *around.split(b"[]", 1))


async def detokenize(context: RequestContext[schemas.DetokenizeRequest]) -> Response:
    """The text of token ids, special tokens included, as vLLM's ``prompt`` and llama.cpp's
    ``content``."""
    state, ids = context.state, context.body.tokens
    await state.adapters.for_openai(context.body.model)
    known = min(state.client.info.vocab_size, state.text.tokenizer.vocab_size)
    if ids and max(ids) >= known:
        raise errors.validation(f"token ids must be >= 0 and < {known}", "tokens")
    tokenizer = state.text.tokenizer
    if len(ids) <= INLINE_IDS:
        return json_parts(_text_body(ids, tokenizer))
    return json_parts(await state.workers.run(_text_body, ids, tokenizer))


async def _tokenize_messages(body: schemas.TokenizeMessagesRequest, state: RouterState) -> Response:
    chat = ChatRequest(
        model=body.model,
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        # By default TGI's chats continue the assistant's last message; vLLM's do not.
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    await state.adapters.for_openai(body.model)
    spec = (await render_chat(chat, state)).spec
    assert isinstance(spec.prompt, str)
    text, rows = await state.generator.images.write(spec.prompt, spec.images, "messages")
    special = bool(body.add_special_tokens)
    return await _vllm_answer(state, text, special, body.return_token_strs, rows)


async def _tokenize_content(body: schemas.TokenizeContentRequest, state: RouterState) -> Response:
    if body.parse_special is False:
        raise errors.unsupported(
            "parse_special", "`parse_special` other than true", "unsupported_value"
        )
    piece = cache(partial(_piece, tokenizer=state.text.tokenizer)) if body.with_pieces else None
    spans = state.workers.spans(body.content, bool(body.add_special))
    _, arrays = await token_arrays(state, spans, piece)
    return json_parts([b'{"tokens":', *arrays[0], b"}"])


async def _vllm_answer(
    state: RouterState,
    text: str,
    add_special_tokens: bool,
    strings: bool | None,
    rows: deque[int] | None = None,
) -> Response:
    values: list[_TokenValue | None] = [None]
    if strings:
        backend = state.text.tokenizer.backend
        values.append(cache(lambda index: backend.id_to_token(index) or ""))
    spans = state.generator.images.spans(text, add_special_tokens, rows or deque())
    count, arrays = await token_arrays(state, spans, *values)
    front = (count, state.generator.info.max_total_tokens)
    strs = arrays[1] if strings else [b"null"]
    return json_parts(
        [
            b'{"count":%d,"max_model_len":%d,"tokens":' % front,
            *arrays[0],
            b',"token_strs":',
            *strs,
            b"}",
        ]
    )


def json_parts(parts: list[bytes]) -> Response:
    """A JSON body in one piece, or a large one part by part."""
    if sum(map(len, parts)) <= WHOLE_BYTES:
        return Response(b"".join(parts), media_type="application/json")

    async def streamed() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return StreamingResponse(streamed(), media_type="application/json")


def _text_body(ids: Sequence[int], tokenizer: Tokenizer) -> list[bytes]:
    # The batch call releases the interpreter lock.
    (decoded,) = tokenizer.backend.decode_batch([ids], skip_special_tokens=False)
    text = _encode(decoded)
    return [b'{"prompt":', text, b',"content":', text, b"}"]


def _piece(index: int, tokenizer: Tokenizer) -> schemas.TokenPiece:
    found = tokenizer.token_bytes(index)
    try:
        return schemas.TokenPiece(id=index, piece=found.decode())
    except UnicodeDecodeError:
        return schemas.TokenPiece(id=index, piece=list(found))


async def token_arrays(
    state: RouterState, spans: AsyncIterator[Spans], *values: _TokenValue | None
) -> tuple[int, list[list[bytes]]]:
    """The number of tokens, and per function a JSON array of its results, in parts.

    None stands for the ids themselves. Tokens are written as they are encoded, some thousand at a
    time: a list of millions holds the interpreter lock for 20 ms when it is searched, and as long
    when it is freed.
    """
    arrays: list[list[bytes]] = [[b"["] for _ in values]
    count = 0
    async for window in spans:
        ids = window.ids
        for array, value in zip(arrays, values, strict=True):
            if len(ids) <= INLINE_IDS:
                parts = _parts(ids, value)
            else:
                parts = await state.workers.run(_parts, ids, value)
            for part in parts:
                array += (part,) if len(array) == 1 else (b",", part)
        count += len(ids)
    for array in arrays:
        array.append(b"]")
    return count, arrays


def _parts(ids: Sequence[int], value: _TokenValue | None) -> list[bytes]:
    """The ids or their values as JSON, without brackets, in parts so that other threads can run."""
    parts = []
    for start in range(0, len(ids), _PART):
        part = ids[start : start + _PART]
        parts.append(_encode(part if value is None else [value(index) for index in part])[1:-1])
    return parts


async def _tgi_tokens(
    state: RouterState, text: str, add_special_tokens: bool, rows: deque[int]
) -> AsyncIterator[bytes]:
    """A JSON array of :class:`SimpleToken`: whole, or of long texts some kilobytes at a time."""

    def encoded(spans: Spans) -> bytes:
        # Encoding holds the interpreter lock.
        tokens = [SimpleToken(index, text[start:stop], start, stop) for index, start, stop in spans]
        return _encode(tokens)[1:-1]

    between = b"["
    async for spans in state.generator.images.spans(text, add_special_tokens, rows):
        short = len(spans) <= _SLICE
        # A slice at a time: threads compete for the interpreter lock with the event loop.
        for start in range(0, len(spans), _SLICE):
            part = spans[start : start + _SLICE]
            yield between
            yield encoded(part) if short else await state.workers.run(encoded, part)
            between = b","
    yield b"[]" if between == b"[" else b"]"


async def _tgi_answer(
    tokens: AsyncIterator[bytes], characters: int, front: bytes = b"", behind: bytes = b""
) -> Response:
    """The tokens between ``front`` and ``behind``; those of a long text are streamed."""

    async def pieces() -> AsyncIterator[bytes]:
        yield front
        async for piece in tokens:
            yield piece
        yield behind

    if characters > WHOLE_BYTES // 4:
        return StreamingResponse(pieces(), media_type="application/json")
    whole = b"".join([piece async for piece in pieces()])
    return Response(whole, media_type="application/json")


_TOKENIZE = Operation(
    tag=GENERATE.tag,
    body=(
        GenerateRequest,
        schemas.TokenizePromptRequest,
        schemas.TokenizeMessagesRequest,
        schemas.TokenizeContentRequest,
    ),
    answer=(list[SimpleToken], schemas.TokenizeAnswer, schemas.TokenizeContentAnswer),
    errors=(404,),
    example=GENERATE.example,
)
_CHAT_TOKENIZE = Operation(
    tag=GENERATE.tag,
    body=(ChatRequest,),
    answer=(ChatTokenizeResponse,),
    example=CHAT.example,
)
_DETOKENIZE = Operation(
    tag="OpenAI",
    body=(schemas.DetokenizeRequest,),
    answer=(schemas.DetokenizeAnswer,),
    errors=(404,),
    example={"tokens": [9, 10]},
)

ROUTES = [
    Endpoint("/tokenize", tokenize, _TOKENIZE, decode=bytes),
    Endpoint("/chat_tokenize", chat_tokenize, _CHAT_TOKENIZE),
    Endpoint("/detokenize", detokenize, _DETOKENIZE),
]
