"""Validation of answers against the schemas of TGI's document and of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from tests.router.sse import events

FIXTURE = Path(__file__).parent / "fixtures" / "tgi-responses.json"


class Contract:
    """Schemas of responses, by ``METHOD /path``, status and content type."""

    def __init__(self, responses: dict[str, Any], components: dict[str, Any]) -> None:
        self.responses = responses
        self._components = components

    def check(self, operation: str, answer: httpx.Response) -> None:
        """Fail unless the answer, or each event of it, is what the operation may answer."""
        kind = answer.headers.get("content-type", "").partition(";")[0]
        schema = self.responses[operation][str(answer.status_code)].get(kind)
        assert schema is not None or not answer.content, f"{operation} answers {kind}"
        if kind == "application/json":
            self.validate(answer.json(), schema)
        elif kind == "text/event-stream":
            found = [event for event in events(answer.text) if event != "[DONE]"]
            assert found
            for event in found:
                self.validate(event, schema)

    def validate(self, value: Any, schema: dict[str, Any]) -> None:
        """Fail unless the value is of the schema."""
        jsonschema.validate(
            value,
            {**schema, "components": self._components},
            cls=jsonschema.Draft202012Validator,
        )


def tgi() -> Contract:
    """TGI's document as JSON Schema, with what a successor to OpenAI's clients must differ in."""
    document = _as_json_schema(json.loads(FIXTURE.read_text()))
    schemas = document["components"]["schemas"]
    responses = document["responses"]
    # OpenAI's clients add deltas up and want null while a text goes on; TGI repeats the role in
    # every delta and says "" where a completion goes on.
    schemas["ChatCompletionDelta"] = {
        "type": "object",
        "properties": {
            name: field
            for kind in ("TextMessage", "ToolCallDelta")
            for name, field in schemas[kind]["properties"].items()
        },
    }
    schemas["Chunk"] = json.loads(
        json.dumps(schemas["Chunk"]).replace("/CompletionComplete", "/CompletionChunk")
    )
    part = json.loads(json.dumps(schemas["CompletionComplete"]))
    part["properties"]["finish_reason"] = {"type": ["string", "null"]}
    schemas["CompletionChunk"] = part
    # What TGI's code does where its document says something else.
    schemas["SagemakerResponse"]["anyOf"].append(responses["POST /"]["200"]["application/json"])
    models = responses["GET /v1/models"]["200"]
    models["application/json"] = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"data": {"type": "array", "items": models["application/json"]}},
    }
    for operation in ("POST /", "POST /generate_stream", "POST /invocations"):
        found = responses[operation]["200"]
        error = {"$ref": "#/components/schemas/ErrorResponse"}
        found["text/event-stream"] = {"anyOf": [found["text/event-stream"], error]}
    responses["GET /health"]["200"] = {}
    return Contract(responses, document["components"])


def _as_json_schema(value: Any) -> Any:
    """OpenAPI 3.0's schemas as JSON Schema; ``oneOf`` read as ``anyOf``."""
    if isinstance(value, list):
        return [_as_json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {
        "anyOf" if key == "oneOf" else key: _as_json_schema(item) for key, item in value.items()
    }
    if found.pop("nullable", None) is True:
        return {"anyOf": [found, {"type": "null"}]}
    return found


def own(document: dict[str, Any]) -> Contract:
    """The API's own document."""
    responses = {
        f"{method.upper()} {path}": {
            status: {
                kind: content["schema"] for kind, content in response.get("content", {}).items()
            }
            for status, response in operation["responses"].items()
        }
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    return Contract(responses, document["components"])
