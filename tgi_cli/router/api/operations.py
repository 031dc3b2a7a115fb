"""What each route takes and answers: the part of the API's document that code does not tell.

Bodies are the types that the routes decode and encode. A test finds a route that is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tgi_cli.router.api.schemas import openai, platforms, responses, service, tgi, tokenize

_READING = (400, 408, 413, 415, 422)
_GENERATING = (*_READING, 424, 429, 500, 503, 504)
"""What a route may answer that lets the engine work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route.

    Attributes:
        tag: the group that it is shown in.
        body: types of the request's body, any of them; none: it has no body.
        answer: the type of a whole answer, or several; a string is a content type of plain text.
            None: an answer without content, or only events.
        events: types of a stream's events, where the answer may be one.
        errors: statuses that it may answer with.
        timed: the request may bring a deadline, and the answer tells how long it took.
        open: it needs no API key.
        example: of a body.
    """

    tag: str
    body: tuple[Any, ...] = ()
    answer: Any = None
    events: tuple[Any, ...] = ()
    errors: tuple[int, ...] = ()
    timed: bool = False
    open: bool = False
    example: Any = None


_INPUTS = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 20}}
_MESSAGES = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20}
_PROMPT = {"prompt": "Once upon a time", "max_tokens": 20}
_TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once upon a time"]}

_EVENTS = (tgi.StreamResponse, service.ErrorResponse)
_GENERATE = Operation(
    tag="Text Generation Inference",
    body=(tgi.GenerateRequest,),
    answer=tgi.GenerateResponse,
    errors=_GENERATING,
    timed=True,
    example=_INPUTS,
)
_COMPAT = replace(
    _GENERATE, body=(tgi.CompatRequest,), answer=list[tgi.GenerateResponse], events=_EVENTS
)
_TOKENIZE = replace(
    _GENERATE,
    body=(
        tgi.GenerateRequest,
        tokenize.TokenizePromptRequest,
        tokenize.TokenizeMessagesRequest,
        tokenize.TokenizeContentRequest,
    ),
    answer=(
        list[tgi.SimpleToken],
        tokenize.TokenizeAnswer,
        tokenize.TokenizeContentAnswer,
    ),
    errors=(*_READING, 404, 500),
    timed=False,
)
_DETOKENIZE = Operation(
    tag="OpenAI",
    body=(tokenize.DetokenizeRequest,),
    answer=tokenize.DetokenizeAnswer,
    errors=(*_READING, 404, 500),
    example={"tokens": [9, 10]},
)
_CHAT_TOKENIZE = replace(
    _TOKENIZE,
    errors=(*_READING, 500),
    body=(openai.ChatRequest,),
    answer=tgi.ChatTokenizeResponse,
    example=_MESSAGES,
)
_CHAT = Operation(
    tag="OpenAI",
    body=(openai.ChatRequest,),
    answer=openai.ChatCompletion,
    events=(service.ChatCompletionChunk, service.OpenAIErrorResponse),
    errors=(*_GENERATING, 404),
    timed=True,
    example=_MESSAGES,
)
_COMPLETIONS = replace(
    _CHAT,
    body=(openai.CompletionRequest,),
    answer=openai.TextCompletion,
    events=(service.CompletionChunk, service.OpenAIErrorResponse),
    example=_PROMPT,
)
_RESPONSES = replace(
    _CHAT,
    body=(responses.ResponsesRequest,),
    answer=responses.ResponseObject,
    events=(responses.ResponseEvent,),
    example={"input": "Hello!", "max_output_tokens": 20},
)
_INVOCATIONS = replace(
    _CHAT,
    tag="Amazon SageMaker",
    body=(*_COMPAT.body, *_CHAT.body, *_COMPLETIONS.body),
    answer=(_COMPAT.answer, _CHAT.answer, _COMPLETIONS.answer),
    events=(*_EVENTS, *_CHAT.events, *_COMPLETIONS.events),
    example=_INPUTS,
)
_ADAPTER = Operation(
    tag="Adapters", answer="text/plain", errors=(*_READING, 403, 404, 429, 500, 503)
)
_HEALTH = Operation(tag="Service", errors=(503,), open=True)
_READY = Operation(tag="KServe", answer=platforms.Liveness, errors=(503,), open=True)
_METADATA = Operation(tag="KServe", answer=platforms.ModelMetadata, errors=(404,))
_MODEL_READY = replace(_READY, errors=(404, 503))
_INFER = Operation(
    tag="KServe",
    body=(platforms.InferRequest,),
    answer=platforms.InferResponse,
    errors=(*_GENERATING, 404),
    timed=True,
    example={"id": "1", "inputs": [_TENSOR]},
)
_VERTEX = Operation(
    tag="Vertex AI",
    body=(platforms.VertexRequest,),
    answer=platforms.VertexResponse,
    errors=(*_GENERATING, 404),
    timed=True,
    example={"instances": [_INPUTS]},
)

_MODEL = "/v2/models/{model}"
_VERSION = f"{_MODEL}/versions/{{version}}"

_OPENAI: dict[tuple[str, str], Operation] = {
    ("POST", "/chat/completions"): _CHAT,
    ("POST", "/completions"): _COMPLETIONS,
    ("POST", "/responses"): _RESPONSES,
    ("POST", "/embeddings"): Operation(tag="OpenAI", errors=(400,)),
    ("GET", "/models"): Operation(tag="OpenAI", answer=service.ModelList),
    ("GET", "/models/{model}"): Operation(tag="OpenAI", answer=service.ModelCard, errors=(404,)),
}
"""Served under /v1, and without it for clients whose base URL lacks it."""

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/"): _COMPAT,
    ("POST", "/generate"): _GENERATE,
    ("POST", "/generate_stream"): replace(_GENERATE, answer=None, events=_EVENTS),
    ("POST", "/tokenize"): _TOKENIZE,
    ("POST", "/chat_tokenize"): _CHAT_TOKENIZE,
    ("POST", "/detokenize"): _DETOKENIZE,
    **{(method, f"/v1{path}"): operation for (method, path), operation in _OPENAI.items()},
    ("POST", "/v1/load_lora_adapter"): replace(_ADAPTER, body=(openai.LoadAdapterRequest,)),
    ("POST", "/v1/unload_lora_adapter"): replace(_ADAPTER, body=(openai.UnloadAdapterRequest,)),
    ("POST", "/invocations"): _INVOCATIONS,
    ("POST", "/vertex"): _VERTEX,
    ("GET", "/v2"): Operation(tag="KServe", answer=platforms.ServerMetadata),
    ("GET", "/v2/health/live"): replace(_READY, errors=()),
    ("GET", "/v2/health/ready"): _READY,
    ("GET", _MODEL): _METADATA,
    ("GET", f"{_MODEL}/ready"): _MODEL_READY,
    ("POST", f"{_MODEL}/infer"): _INFER,
    ("GET", _VERSION): _METADATA,
    ("GET", f"{_VERSION}/ready"): _MODEL_READY,
    ("POST", f"{_VERSION}/infer"): _INFER,
    ("GET", "/"): _HEALTH,
    ("GET", "/health"): _HEALTH,
    ("GET", "/ping"): _HEALTH,
    ("POST", "/ping"): replace(_HEALTH, open=False),
    ("GET", "/version"): Operation(tag="Service", answer=tokenize.Version),
    ("GET", "/info"): Operation(tag="Service", answer=tgi.Info),
    ("GET", "/metrics"): Operation(tag="Service", answer="text/plain", open=True),
    ("GET", "/docs"): Operation(tag="Service", answer="text/html"),
    ("GET", "/api-doc/openapi.json"): Operation(tag="Service", answer=dict[str, Any]),
    **_OPENAI,
}
"""By method and path."""

NAMED: dict[str, Operation] = {"vertex_predict": _VERTEX, "vertex_health": _HEALTH}
"""Of routes whose paths the environment gives, by the routes' names."""

ALSO: tuple[Any, ...] = (platforms.VertexInstance,)
"""Types that others refer to by name."""
