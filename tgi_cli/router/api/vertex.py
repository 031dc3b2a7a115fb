"""Google Vertex AI: ``POST /vertex``, and the routes that its environment names.

https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.errors import ConfigError
from tgi_cli.router.api.health import health
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.api.schemas.platforms import (
    VertexInstance,
    VertexParameters,
    VertexRequest,
    VertexResponse,
)
from tgi_cli.router.api.schemas.tgi import GenerateRequest
from tgi_cli.router.api.tgi import answer_all, tgi_spec
from tgi_cli.router.bounds import BATCH
from tgi_cli.router.generation.chat_prompt import render_chat
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response, parse, read_body, wrong_types
from tgi_cli.router.state import RouterState, state_of


class _Keys(msgspec.Struct):
    inputs: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET


class _Objects(msgspec.Struct):
    instances: Annotated[list[_Keys], Meta(max_length=BATCH)]


_OBJECTS = msgspec.json.Decoder(_Objects)
_REQUEST = msgspec.json.Decoder(VertexRequest)
_KEYS = msgspec.json.Decoder(_Keys)
_INSTANCE = msgspec.json.Decoder(VertexInstance)
_CHAT = msgspec.json.Decoder(ChatRequest)


async def vertex(request: Request) -> Response:
    """The text that follows each instance, a prompt or a conversation; all run together."""
    arrived = time.perf_counter()
    state = state_of(request)
    raw_body = await read_body(request, state.config.payload_limit)
    # What is no object ends the decoding: a million numbers, kept as they are, would take 70 MB.
    parse(raw_body, _OBJECTS)
    body = parse(raw_body, _REQUEST)
    try:
        if not body.instances:
            raise errors.validation("`instances` cannot be empty", "instances")
        state.generator.fit(len(body.instances))  # before any of them is read
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    asked = [_instance(place, raw) for place, raw in enumerate(body.instances)]
    try:
        specs = [await _spec(instance, state) for instance in asked]
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    answers, headers = await answer_all(request, specs, arrived)
    predictions = [
        _front(instance) + answer.finish.text
        for instance, answer in zip(asked, answers, strict=True)
    ]
    return json_response(VertexResponse(predictions=predictions), headers)


def _instance(place: int, raw: Raw) -> GenerateRequest | ChatRequest:
    """Raises ApiError: 422 with the instance's place in it."""
    try:
        keys = parse(raw, _KEYS)
        if keys.inputs is not UNSET:
            instance = parse(raw, _INSTANCE)
            return GenerateRequest(
                inputs=instance.inputs, parameters=instance.parameters or VertexParameters()
            )
        if keys.messages is not UNSET:
            return parse(raw, _CHAT)
        raise wrong_types("Object misses `inputs` and `messages`; it needs one of them")
    except errors.ApiError as error:
        where = f"{error.message} (in instances[{place}])"
        raise errors.ApiError(error.status, where, error.error_type, plain=error.plain) from None


async def _spec(instance: GenerateRequest | ChatRequest, state: RouterState) -> GenerationSpec:
    if isinstance(instance, GenerateRequest):
        return await tgi_spec(instance, state)
    adapter = await state.adapters.openai(instance.model, instance.adapter_id)
    # One text for each instance, so one sample.
    return replace((await render_chat(instance, state)).spec, adapter=adapter, samples=1)


def _front(instance: GenerateRequest | ChatRequest) -> str:
    if isinstance(instance, GenerateRequest) and instance.parameters.return_full_text:
        return instance.inputs
    return ""


def environment_routes(environment: Mapping[str, str]) -> list[Route]:
    """What Vertex calls, by ``AIP_PREDICT_ROUTE`` and ``AIP_HEALTH_ROUTE``; none elsewhere.

    Raises ConfigError when one of them is no path.
    """
    routes = []
    for variable, endpoint, method, name in (
        ("AIP_PREDICT_ROUTE", vertex, "POST", "vertex_predict"),
        ("AIP_HEALTH_ROUTE", health, "GET", "vertex_health"),
    ):
        path = environment.get(variable, "")
        if not path:
            continue
        if not path.startswith("/") or "{" in path or "}" in path:
            raise ConfigError(f"{variable}={path} is no path", "give one that begins with /")
        routes.append(Route(path, endpoint, methods=[method], name=name))
    return routes


ROUTES = [Route("/vertex", vertex, methods=["POST"])]
