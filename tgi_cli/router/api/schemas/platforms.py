"""Bodies of hosting platforms: Vertex AI, and KServe's Open Inference Protocol (v2).

https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements,
https://github.com/kserve/open-inference-protocol. Where TGI differs, its forms are supported too.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgi_cli.router.api.schemas.openai import ContentParts
from tgi_cli.router.api.schemas.tgi import GenerateParameters, GenerateRequest
from tgi_cli.router.bounds import BATCH, Dimensions, Name, Text

Byte = Annotated[int, Meta(ge=0, le=255)]

_DATA = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 255}, {"type": "string"}]},
}
Data = Annotated[msgspec.Raw, Meta(extra_json_schema=_DATA)]
"""Texts, or bytes as numbers, which are decoded in slices as a body may have many."""

_INSTANCE = {
    "anyOf": [
        {"$ref": "#/components/schemas/VertexInstance"},
        {"$ref": "#/components/schemas/ChatRequest"},
    ]
}


class VertexParameters(GenerateParameters, kw_only=True):
    """The parameters of ``/generate``; on Vertex, TGI samples by default."""

    do_sample: bool = True


class VertexInstance(msgspec.Struct, kw_only=True):
    """A prompt of ``/vertex``; ``parameters`` may be null."""

    inputs: Text | ContentParts
    parameters: VertexParameters | None = None


class VertexRequest(msgspec.Struct, kw_only=True):
    """The body of ``/vertex``: prompts or conversations, each with its own keys."""

    instances: Annotated[
        list[Annotated[msgspec.Raw, Meta(extra_json_schema=_INSTANCE)]], Meta(max_length=BATCH)
    ]


class VertexResponse(msgspec.Struct, kw_only=True):
    """The text for each instance, in order."""

    predictions: list[str]


class InferInput(msgspec.Struct, kw_only=True):
    """A tensor of prompts: texts, or the UTF-8 bytes of a single text as numbers."""

    name: Name
    shape: Dimensions
    datatype: Name
    data: Data


class RequestedOutput(msgspec.Struct, kw_only=True):
    """The name of an output."""

    name: Name


class InferRequest(msgspec.Struct, kw_only=True):
    """The body of an inference; outputs, if named, are as many as inputs."""

    id: Name | None = None
    parameters: GenerateParameters = msgspec.field(
        default_factory=lambda: GenerateParameters(do_sample=True)
    )
    inputs: Annotated[list[InferInput], Meta(max_length=BATCH)]
    outputs: Annotated[list[RequestedOutput], Meta(max_length=BATCH)] | None = None

    def requests(self, prompts: list[str]) -> list[GenerateRequest]:
        """One request for each prompt."""
        return [GenerateRequest(inputs=prompt, parameters=self.parameters) for prompt in prompts]


class InferOutput(msgspec.Struct, kw_only=True):
    """The texts that follow one input's prompts, in the same form."""

    name: str
    shape: list[int]
    datatype: str
    data: Data


class InferResponse(msgspec.Struct, kw_only=True):
    """The answer of an inference."""

    model_name: str
    model_version: str
    id: str | UnsetType = UNSET
    outputs: list[InferOutput]


class Liveness(msgspec.Struct, kw_only=True):
    """The answer of health routes; like TGI's it has ``live`` where ready is meant."""

    live: bool
    ready: bool | UnsetType = UNSET


class ServerMetadata(msgspec.Struct, kw_only=True):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(msgspec.Struct, kw_only=True):
    """A tensor; a dimension of -1 is variable."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct, kw_only=True):
    """The model, with TGI's fields and the protocol's."""

    name: str
    version: str
    extensions: list[str]
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
