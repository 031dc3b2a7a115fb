"""KServe's Open Inference Protocol, version 2: ``/v2/...``.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
One model is served, under whatever name: KServe calls it as the InferenceService is called.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta, Raw
from starlette.responses import Response

from tgi_cli.router.api.schemas import platforms as schemas
from tgi_cli.router.api.service import check_health
from tgi_cli.router.api.tgi import GENERATE, best_answers, tgi_spec
from tgi_cli.router.bounds import Text
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.state import RouterState
from tgi_cli.version import __version__

_SLICE = 64 * 1024
"""Bytes, written as numbers, that are decoded or encoded at once: 2 ms."""
_LIST_OF_BYTES = msgspec.json.Decoder(Annotated[list[schemas.Byte], Meta(max_length=_SLICE)])
_LIST_OF_TEXTS = msgspec.json.Decoder(Annotated[list[Text], Meta(extra={"bound": "values"})])
_encode = msgspec.json.Encoder().encode

_NAME = "text-generation-inference"
_TEXTS = "BYTES"
"""The protocol's name for tensors of texts."""


async def live(context: RequestContext[None]) -> Response:
    """Whether the server's process answers."""
    return json_response(schemas.Liveness(live=True))


async def ready(context: RequestContext[None]) -> Response:
    """Whether the server can answer requests; otherwise 503."""
    await check_health(context.state)
    return json_response(schemas.Liveness(live=True, ready=True))


async def server_metadata(context: RequestContext[None]) -> Response:
    """The server's name, version and extensions of the protocol."""
    return json_response(
        schemas.ServerMetadata(
            name=_NAME, version=__version__, extensions=["health", "models", "metrics"]
        )
    )


async def model_metadata(context: RequestContext[None]) -> Response:
    """The inputs and outputs of an inference."""
    version = _version(context)
    return json_response(
        schemas.ModelMetadata(
            name=context.request.path_params["model"],
            version=version,
            extensions=["infer", "ready"],
            versions=[version],
            platform=_NAME,
            inputs=[schemas.TensorMetadata(name="text_input", datatype=_TEXTS, shape=[-1])],
            outputs=[schemas.TensorMetadata(name="text_output", datatype=_TEXTS, shape=[-1])],
        )
    )


async def infer(context: RequestContext[schemas.InferRequest]) -> Response:
    """The text that follows each prompt of each input; all run together."""
    body, state = context.body, context.state
    with context.preparing():
        state.generator.fit(len(body.inputs))
        prompts = [await _prompts(tensor, state) for tensor in body.inputs]
        if body.outputs is not None and len(body.outputs) != len(body.inputs):
            raise errors.ApiError(422, "Inputs and outputs length mismatch", "length mismatch")
        flat = [prompt for tensor in prompts for prompt in tensor]
        if not flat:
            raise errors.validation("`inputs` cannot be empty", "inputs")
        state.generator.fit(len(flat))
        specs = [await tgi_spec(one, state) for one in body.requests(flat)]
    answers = await best_answers(context, specs)
    full_text = body.parameters.return_full_text
    texts = iter(
        prompt + answer.finish.text if full_text else answer.finish.text
        for prompt, answer in zip(flat, answers, strict=True)
    )
    response = schemas.InferResponse(
        model_name=context.request.path_params["model"],
        model_version=_version(context),
        outputs=[
            await _output(tensor, name, [next(texts) for _ in found], state)
            for tensor, name, found in zip(body.inputs, _names(body), prompts, strict=True)
        ],
    )
    if body.id is not None:
        response.id = body.id
    return context.answer(response, [answer.generation for answer in answers])


def _version(context: RequestContext[object]) -> str:
    version: str = context.request.path_params.get("version", "1")
    return version


async def _prompts(tensor: schemas.InferInput, state: RouterState) -> list[str]:
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


def _is_bytes(tensor: schemas.InferInput) -> bool:
    return bytes(tensor.data).lstrip(b"[ \t\r\n")[:1] not in b'"]'


def _read(data: bytes) -> bytes:
    """Decode a JSON array of bytes in slices, as decoding holds the interpreter lock."""
    items = data.strip()[1:-1]
    read = bytearray()
    start = 0
    while start < len(items):
        stop = items.find(b",", start + _SLICE)
        stop = len(items) if stop < 0 else stop
        read += bytes(_LIST_OF_BYTES.decode(b"[" + items[start:stop] + b"]"))
        start = stop + 1
    return bytes(read)


def _written(data: bytes) -> Raw:
    """Encode bytes as a JSON array of numbers."""
    slices = [data[start : start + _SLICE] for start in range(0, len(data), _SLICE)]
    return Raw(b"[" + b",".join(_encode(list(piece))[1:-1] for piece in slices) + b"]")


async def _output(
    tensor: schemas.InferInput, name: str, texts: list[str], state: RouterState
) -> schemas.InferOutput:
    if not _is_bytes(tensor):
        shape, data = [len(texts)], Raw(_encode(texts))
    else:
        (text,) = texts
        read = text.encode()
        shape = [1, len(read)]
        short = len(read) <= _SLICE
        data = _written(read) if short else await state.workers.run(_written, read)
    return schemas.InferOutput(name=name, shape=shape, datatype=_TEXTS, data=data)


def _names(body: schemas.InferRequest) -> list[str]:
    if body.outputs is not None:
        return [output.name for output in body.outputs]
    if len(body.inputs) == 1:
        return ["text_output"]
    return [f"text_output_{index}" for index in range(len(body.inputs))]


_KSERVE = Operation(tag="KServe")
_LIVE = replace(_KSERVE, answer=(schemas.Liveness,), public=True)
_READY = replace(_LIVE, errors=(503,))
_MODEL_READY = replace(_LIVE, errors=(404, 503))
_SERVER = replace(_KSERVE, answer=(schemas.ServerMetadata,))
_METADATA = replace(_KSERVE, answer=(schemas.ModelMetadata,), errors=(404,))
_TENSOR = {"name": "text_input", "shape": [1], "datatype": _TEXTS, "data": ["Once upon a time"]}
_INFER = replace(
    GENERATE,
    tag="KServe",
    body=(schemas.InferRequest,),
    answer=(schemas.InferResponse,),
    errors=(404,),
    example={"id": "1", "inputs": [_TENSOR]},
)

_MODEL = "/v2/models/{model:path}"
_VERSION = f"{_MODEL}/versions/{{version}}"

ROUTES = [
    Endpoint("/v2", server_metadata, _SERVER, method="GET"),
    Endpoint("/v2/health/live", live, _LIVE, method="GET"),
    Endpoint("/v2/health/ready", ready, _READY, method="GET"),
    Endpoint(f"{_VERSION}/infer", infer, _INFER),
    Endpoint(f"{_VERSION}/ready", ready, _MODEL_READY, method="GET"),
    Endpoint(_VERSION, model_metadata, _METADATA, method="GET"),
    Endpoint(f"{_MODEL}/infer", infer, _INFER),
    Endpoint(f"{_MODEL}/ready", ready, _MODEL_READY, method="GET"),
    Endpoint(_MODEL, model_metadata, _METADATA, method="GET"),
]
