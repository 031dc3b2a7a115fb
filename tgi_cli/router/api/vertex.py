"""Google Vertex AI: ``POST /vertex``, and the routes that its environment names.

https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta, Raw
from starlette.responses import Response

from tgi_cli.errors import ConfigError
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.api.schemas.platforms import (
    VertexInstance,
    VertexParameters,
    VertexRequest,
    VertexResponse,
)
from tgi_cli.router.api.schemas.tgi import GenerateRequest
from tgi_cli.router.api.service import HEALTH, health
from tgi_cli.router.api.tgi import GENERATE, best_answers, tgi_spec
from tgi_cli.router.bounds import BATCH
from tgi_cli.router.generation.chat_prompt import render_chat
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import first_key, parse
from tgi_cli.router.http.body_errors import wrong_types
from tgi_cli.router.http.endpoint import Endpoint, RequestContext
from tgi_cli.router.state import RouterState


class _Object(msgspec.Struct):
    """Any JSON object."""


class _Instances(msgspec.Struct):
    instances: Annotated[list[_Object], Meta(max_length=BATCH)]


async def vertex(context: RequestContext[VertexRequest]) -> Response:
    """The text that follows each instance, a prompt or a conversation; all run together."""
    state, raws = context.state, context.body.instances
    with context.preparing():
        if not raws:
            raise errors.validation("`instances` cannot be empty", "instances")
        state.generator.fit(len(raws))  # before decoding any of them
        instances = [_instance(index, raw) for index, raw in enumerate(raws)]
        specs = [await _spec(instance, state) for instance in instances]
    answers = await best_answers(context, specs)
    predictions = [
        _prefix(instance) + answer.finish.text
        for instance, answer in zip(instances, answers, strict=True)
    ]
    generations = [answer.generation for answer in answers]
    return context.answer(VertexResponse(predictions=predictions), generations)


def _request(body: bytes) -> VertexRequest:
    # Fail at the first that is not an object: a million numbers would take 70 MB as Raw.
    parse(body, _Instances)
    return parse(body, VertexRequest)


def _instance(index: int, raw: Raw) -> GenerateRequest | ChatRequest:
    """Decode an instance. Raises ApiError, 422, that names its index."""
    try:
        key = first_key(raw, "inputs", "messages")
        if key == "inputs":
            instance = parse(raw, VertexInstance)
            return GenerateRequest(
                inputs=instance.inputs, parameters=instance.parameters or VertexParameters()
            )
        if key == "messages":
            return parse(raw, ChatRequest)
        raise wrong_types("Object misses `inputs` and `messages`; it needs one of them")
    except errors.ApiError as error:
        message = f"{error.message} (in instances[{index}])"
        raise errors.ApiError(error.status, message, error.error_type, plain=error.plain) from None


async def _spec(instance: GenerateRequest | ChatRequest, state: RouterState) -> GenerationSpec:
    if isinstance(instance, GenerateRequest):
        return await tgi_spec(instance, state)
    adapter = await state.adapters.for_openai(instance.model, instance.adapter_id)
    # One text for each instance, so one sample.
    return replace((await render_chat(instance, state)).spec, adapter=adapter, samples=1)


def _prefix(instance: GenerateRequest | ChatRequest) -> str:
    if isinstance(instance, GenerateRequest) and instance.parameters.return_full_text:
        return instance.text
    return ""


_VERTEX = replace(
    GENERATE,
    tag="Vertex AI",
    body=(VertexRequest,),
    answer=(VertexResponse,),
    referenced=(VertexInstance, ChatRequest),
    errors=(404,),
    example={"instances": [GENERATE.example]},
)

ROUTES = [Endpoint("/vertex", vertex, _VERTEX, decode=_request)]


def environment_routes(environment: Mapping[str, str]) -> list[Endpoint]:
    """The routes that ``AIP_PREDICT_ROUTE`` and ``AIP_HEALTH_ROUTE`` name.

    Raises ConfigError if one of them is not a path.
    """
    paths = {}
    for variable in ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"):
        paths[variable] = path = environment.get(variable, "")
        if path and (not path.startswith("/") or "{" in path or "}" in path):
            raise ConfigError(f"{variable}={path} is no path", "give one that begins with /")
    predict, probe = paths.values()
    routes = []
    if predict:
        routes.append(Endpoint(predict, vertex, _VERTEX, name="vertex_predict", decode=_request))
    if probe:
        routes.append(Endpoint(probe, health, HEALTH, method="GET", name="vertex_health"))
    return routes
