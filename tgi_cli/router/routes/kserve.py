"""KServe's Open Inference Protocol, version 2: ``/v2/...``.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
One model is served, under whatever name: KServe calls it as the InferenceService is called.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import tgi_cli
from tgi_cli.router import errors
from tgi_cli.router.http import json_response, read_json
from tgi_cli.router.routes.health import check
from tgi_cli.router.routes.native import answer_all, native_request
from tgi_cli.router.schemas.platforms import (
    InferInput,
    InferOutput,
    InferRequest,
    InferResponse,
    Liveness,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from tgi_cli.router.state import state_of

_INFER = msgspec.json.Decoder(InferRequest)
_NAME = "text-generation-inference"
_TEXTS = "BYTES"
"""The protocol's name for tensors of texts."""


async def live(request: Request) -> Response:
    """Whether the server's process answers."""
    return json_response(Liveness(live=True))


async def ready(request: Request) -> Response:
    """Whether requests would be answered; else 503."""
    await check(request)
    return json_response(Liveness(live=True, ready=True))


async def server_metadata(request: Request) -> Response:
    """What serves, and by which extensions of the protocol."""
    return json_response(
        ServerMetadata(
            name=_NAME, version=tgi_cli.__version__, extensions=["health", "models", "metrics"]
        )
    )


async def model_metadata(request: Request) -> Response:
    """What an inference takes and gives."""
    version = _version(request)
    return json_response(
        ModelMetadata(
            name=request.path_params["model"],
            version=version,
            extensions=["infer", "ready"],
            versions=[version],
            platform=_NAME,
            inputs=[TensorMetadata(name="text_input", datatype=_TEXTS, shape=[-1])],
            outputs=[TensorMetadata(name="text_output", datatype=_TEXTS, shape=[-1])],
        )
    )


async def infer(request: Request) -> Response:
    """The text that follows each prompt of each input; all run together."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _INFER, state.config.payload_limit)
    try:
        prompts = [_prompts(tensor) for tensor in body.inputs]
        if body.outputs is not None and len(body.outputs) != len(body.inputs):
            raise errors.ApiError(422, "Inputs and outputs length mismatch", "length mismatch")
        flat = [prompt for tensor in prompts for prompt in tensor]
        if not flat:
            raise errors.validation("`inputs` cannot be empty", "inputs")
        specs = [await native_request(one, state) for one in body.requests(flat)]
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    answers, headers = await answer_all(request, specs, arrived)
    front = body.parameters.return_full_text
    texts = iter(
        prompt + answer.finish.text if front else answer.finish.text
        for prompt, answer in zip(flat, answers, strict=True)
    )
    answer = InferResponse(
        model_name=request.path_params["model"],
        model_version=_version(request),
        outputs=list(_outputs(body, prompts, texts)),
    )
    if body.id is not None:
        answer.id = body.id
    return json_response(answer, headers)


def _version(request: Request) -> str:
    version: str = request.path_params.get("version", "1")
    return version


def _prompts(tensor: InferInput) -> list[str]:
    """Raises ApiError: 422."""
    texts = [item for item in tensor.data if isinstance(item, str)]
    if len(texts) == len(tensor.data):
        return texts
    if texts:
        raise errors.validation(
            f"`data` of input {tensor.name!r} must be texts, or the bytes of one", "inputs"
        )
    try:
        return [bytes(item for item in tensor.data if isinstance(item, int)).decode()]
    except UnicodeDecodeError as error:
        raise errors.ApiError(422, f"input {tensor.name!r}: {error}", "utf8") from error


def _outputs(
    body: InferRequest, prompts: list[list[str]], texts: Iterator[str]
) -> Iterator[InferOutput]:
    for place, tensor in enumerate(body.inputs):
        name = "text_output" if len(body.inputs) == 1 else f"text_output_{place}"
        if body.outputs is not None:
            name = body.outputs[place].name
        found = [next(texts) for _ in prompts[place]]
        if tensor.data and isinstance(tensor.data[0], int):
            data = list(found[0].encode())
            yield InferOutput(name=name, shape=[1, len(data)], datatype=_TEXTS, data=[*data])
        else:
            yield InferOutput(name=name, shape=[len(found)], datatype=_TEXTS, data=[*found])


_MODEL = "/v2/models/{model:path}"

ROUTES = [
    Route("/v2", server_metadata, methods=["GET"]),
    Route("/v2/health/live", live, methods=["GET"]),
    Route("/v2/health/ready", ready, methods=["GET"]),
    Route(f"{_MODEL}/versions/{{version}}/infer", infer, methods=["POST"]),
    Route(f"{_MODEL}/versions/{{version}}/ready", ready, methods=["GET"]),
    Route(f"{_MODEL}/versions/{{version}}", model_metadata, methods=["GET"]),
    Route(f"{_MODEL}/infer", infer, methods=["POST"]),
    Route(f"{_MODEL}/ready", ready, methods=["GET"]),
    Route(_MODEL, model_metadata, methods=["GET"]),
]
