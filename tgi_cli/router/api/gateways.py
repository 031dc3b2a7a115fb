"""What gateways ask a server for: its kind, its model, its load, and the tokens of a prompt.

``/server_info``, ``/model_info`` and ``/v1/loads`` are SGLang's, which SMG reads, each also by its
older name; ``/v1/completions/render`` and ``/v1/chat/completions/render`` are vLLM's, with which
routers find the server that has cached a prompt.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from datetime import UTC, datetime
from itertools import chain

import msgspec
from starlette.responses import Response

from tgi_cli.router.api.chat import CHAT
from tgi_cli.router.api.completions import COMPLETIONS, prompts_of
from tgi_cli.router.api.openai_common import v1_endpoints
from tgi_cli.router.api.schemas.openai import ChatRequest, CompletionRequest
from tgi_cli.router.api.schemas.service import (
    Loads,
    ModelInfo,
    RenderedPrompt,
    ReplicaLoad,
    ServerInfo,
)
from tgi_cli.router.api.service import SERVICE
from tgi_cli.router.api.tokenize import json_parts, token_arrays
from tgi_cli.router.generation.chat_prompt import render_chat
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.replicas.pool import replicas_of
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.interface import EngineClient
from tgi_cli.version import __version__

_encode = msgspec.json.Encoder().encode


async def server_info(context: RequestContext[None]) -> Response:
    """The server's model and limits, as SGLang answers it."""
    state = context.state
    config, info = state.config, state.generator.info
    replicas = [client.info for client in replicas_of(state.client)]
    running = sum(each.max_batch_size for each in replicas)
    return json_response(
        ServerInfo(
            model_id=config.model_id,
            model_path=config.model_id,
            served_model_name=config.served_names[0],
            version=__version__,
            dtype=info.dtype,
            quantization=info.quantize or None,
            device=info.device,
            tp_size=info.num_shard,
            dp_size=len(replicas),
            pp_size=info.pipeline_parallel_size,
            context_length=info.max_total_tokens,
            max_total_tokens=sum(each.max_batch_total_tokens for each in replicas),
            max_running_requests=min(config.max_concurrent_requests, running),
            is_embedding=False,
        )
    )


async def model_info(context: RequestContext[None]) -> Response:
    """The model, as SGLang answers it."""
    state = context.state
    config, info = state.config, state.generator.info
    return json_response(
        ModelInfo(
            model_path=config.model_id,
            tokenizer_path=config.model_id,
            served_model_name=config.served_names[0],
            model_type=info.model_type,
            is_generation=True,
            has_image_understanding=state.images is not None,
            has_audio_understanding=False,
            max_model_len=info.max_total_tokens,
        )
    )


async def loads(context: RequestContext[None]) -> Response:
    """The load of each replica, as SGLang answers it; its query parameters are ignored."""
    replicas = replicas_of(context.state.client)
    found = await asyncio.gather(*(_load(rank, each) for rank, each in enumerate(replicas)))
    return json_response(
        Loads(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=len(found),
            loads=list(found),
        )
    )


async def _load(rank: int, client: EngineClient) -> ReplicaLoad:
    info, load = client.info, (await client.metrics()).load
    used, capacity = load.used_blocks * info.block_size, info.max_batch_total_tokens
    return ReplicaLoad(
        dp_rank=rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.queued,
        num_total_reqs=load.running + load.queued,
        num_used_tokens=used,
        max_total_num_tokens=capacity,
        token_usage=used / capacity if capacity else 0.0,
        cache_hit_rate=load.reused_tokens / load.prompt_tokens if load.prompt_tokens else 0.0,
        utilization=load.running / info.max_batch_size if info.max_batch_size else 0.0,
        max_running_requests=info.max_batch_size,
    )


async def render_completion(context: RequestContext[CompletionRequest]) -> Response:
    """The token ids of each prompt of a request for completions, which is not run."""
    body, state = context.body, context.state
    await state.adapters.for_openai(body.model, body.adapter_id)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    parts: list[bytes] = []
    for index, prompt in enumerate(prompts_of(body, state)):
        parts += [
            b"," if index else b"[",
            *await _rendered(f"{request_id}-{index}", body.model, prompt, state),
        ]
    return json_parts([*parts, b"]"])


async def render_chat_completion(context: RequestContext[ChatRequest]) -> Response:
    """The token ids that the chat template makes of a conversation, which is not run."""
    body, state = context.body, context.state
    await state.adapters.for_openai(body.model, body.adapter_id)
    spec = (await render_chat(body, state)).spec
    assert isinstance(spec.prompt, str)
    text, rows = await state.generator.images.write(spec.prompt, spec.images, "messages")
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    return json_parts(
        await _rendered(request_id, body.model, text, state, spec.add_special_tokens, rows)
    )


async def _rendered(
    request_id: str,
    model: str | None,
    prompt: str | tuple[int, ...],
    state: RouterState,
    add_special_tokens: bool = True,
    rows: deque[int] | None = None,
) -> list[bytes]:
    """The parts of a :class:`RenderedPrompt`. Raises ApiError."""
    if isinstance(prompt, str):
        spans = state.generator.images.spans(prompt, add_special_tokens, rows or deque())
        _, (ids,) = await token_arrays(state, spans, None)
    else:
        ids = [_encode(prompt)]
    front = {"request_id": request_id, "model": state.model_name(model)}
    return [_encode(front)[:-1], b',"token_ids":', *ids, b"}"]


_SERVER_INFO = Operation(tag=SERVICE.tag, answer=(ServerInfo,))
_MODEL_INFO = Operation(tag=SERVICE.tag, answer=(ModelInfo,))
_LOADS = Operation(tag=SERVICE.tag, answer=(Loads,))
_RENDER = Operation(
    tag="OpenAI",
    body=(CompletionRequest,),
    answer=(list[RenderedPrompt],),
    errors=(404,),
    example=COMPLETIONS.example,
)
_RENDER_CHAT = Operation(
    tag="OpenAI",
    body=(ChatRequest,),
    answer=(RenderedPrompt,),
    errors=(404,),
    example=CHAT.example,
)

ROUTES = [
    *chain.from_iterable(
        (
            Endpoint(f"/{name}", handler, operation, method="GET"),
            Endpoint(f"/get_{name}", handler, operation, method="GET"),
        )
        for name, handler, operation in (
            ("server_info", server_info, _SERVER_INFO),
            ("model_info", model_info, _MODEL_INFO),
        )
    ),
    *v1_endpoints("/loads", loads, _LOADS, method="GET"),
    *v1_endpoints("/completions/render", render_completion, _RENDER),
    *v1_endpoints("/chat/completions/render", render_chat_completion, _RENDER_CHAT),
]
