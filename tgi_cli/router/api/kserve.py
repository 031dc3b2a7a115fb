"""KServe's Open Inference Protocol, version 2: ``/v2/...``.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
One model is served, under whatever name: KServe calls it as the InferenceService is called.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta, Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import tgi_cli
from tgi_cli.router.api.health import check
from tgi_cli.router.api.schemas.platforms import (
    Byte,
    InferInput,
    InferOutput,
    InferRequest,
    InferResponse,
    Liveness,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from tgi_cli.router.api.tgi import answer_all, tgi_spec
from tgi_cli.router.bounds import Text
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response, read_json
from tgi_cli.router.state import RouterState, state_of

_SLICE = 64 * 1024
"""Of bytes as numbers, read and written in one go: 2 ms."""
_INFER = msgspec.json.Decoder(InferRequest)
_LIST_OF_BYTES = msgspec.json.Decoder(Annotated[list[Byte], Meta(max_length=_SLICE)])
_LIST_OF_TEXTS = msgspec.json.Decoder(Annotated[list[Text], Meta(extra={"bound": "values"})])
_encode = msgspec.json.Encoder().encode

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
        state.generator.fit(len(body.inputs))
        prompts = [await _prompts(tensor, state) for tensor in body.inputs]
        if body.outputs is not None and len(body.outputs) != len(body.inputs):
            raise errors.ApiError(422, "Inputs and outputs length mismatch", "length mismatch")
        flat = [prompt for tensor in prompts for prompt in tensor]
        if not flat:
            raise errors.validation("`inputs` cannot be empty", "inputs")
        state.generator.fit(len(flat))
        specs = [await tgi_spec(one, state) for one in body.requests(flat)]
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
        outputs=[
            await _output(tensor, name, [next(texts) for _ in found], state)
            for tensor, name, found in zip(body.inputs, _names(body), prompts, strict=True)
        ],
    )
    if body.id is not None:
        answer.id = body.id
    return json_response(answer, headers)


def _version(request: Request) -> str:
    version: str = request.path_params.get("version", "1")
    return version


async def _prompts(tensor: InferInput, state: RouterState) -> list[str]:
    """Raises ApiError: 422."""
    data = bytes(tensor.data)
    try:
        if not _is_bytes(tensor) or data.lstrip()[:1] != b"[":
            texts: list[str] = _LIST_OF_TEXTS.decode(data)
            return texts
        read = _read(data) if len(data) <= _SLICE else await state.workers.run(_read, data)
        return [read.decode()]
    except msgspec.DecodeError as error:
        raise errors.validation(
            f"`data` of input {tensor.name!r} must be texts, or the bytes of one", "inputs"
        ) from error
    except UnicodeDecodeError as error:
        raise errors.ApiError(422, f"input {tensor.name!r}: {error}", "utf8") from error


def _is_bytes(tensor: InferInput) -> bool:
    return bytes(tensor.data).lstrip(b"[ \t\r\n")[:1] not in b'"]'


def _read(data: bytes) -> bytes:
    """The bytes of a JSON array of numbers, a slice at a time: decoding keeps other threads out."""
    items = data.strip()[1:-1]
    found = bytearray()
    start = 0
    while start < len(items):
        stop = items.find(b",", start + _SLICE)
        stop = len(items) if stop < 0 else stop
        found += bytes(_LIST_OF_BYTES.decode(b"[" + items[start:stop] + b"]"))
        start = stop + 1
    return bytes(found)


def _written(data: bytes) -> Raw:
    """The bytes as a JSON array of numbers."""
    slices = [data[start : start + _SLICE] for start in range(0, len(data), _SLICE)]
    return Raw(b"[" + b",".join(_encode(list(piece))[1:-1] for piece in slices) + b"]")


async def _output(
    tensor: InferInput, name: str, texts: list[str], state: RouterState
) -> InferOutput:
    if not _is_bytes(tensor):
        shape, data = [len(texts)], Raw(_encode(texts))
    else:
        (text,) = texts
        read = text.encode()
        shape = [1, len(read)]
        short = len(read) <= _SLICE
        data = _written(read) if short else await state.workers.run(_written, read)
    return InferOutput(name=name, shape=shape, datatype=_TEXTS, data=data)


def _names(body: InferRequest) -> list[str]:
    if body.outputs is not None:
        return [output.name for output in body.outputs]
    if len(body.inputs) == 1:
        return ["text_output"]
    return [f"text_output_{place}" for place in range(len(body.inputs))]


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
