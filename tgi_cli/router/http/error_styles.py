"""The forms in which errors are written: TGI's, OpenAI's and Anthropic's.

The path decides on the form when the error is written; on ``/v1`` paths that vendors share, a
header of Anthropic's clients does.

TGI's routes answer ``{"error": TEXT, "error_type": TYPE}``, and plain text where TGI's web
framework did. OpenAI's routes answer as OpenAI
(https://platform.openai.com/docs/guides/error-codes), with ``error_type`` added: 400 where TGI
has 422, so that clients raise ``BadRequestError``, and 500 where TGI has 424, which OpenAI's
clients take for a server error and retry. Anthropic's routes answer as Anthropic
(https://docs.anthropic.com/en/api/errors): 529 for an overloaded server, and the id of the request
in the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from tgi_cli.router.http.errors import ApiError
from tgi_cli.router.observability import access_log

_VERTEX_ROUTES = ("vertex_predict", "vertex_health")
"""Names of routes whose paths Vertex AI chooses, such as /v1/endpoints/..., in TGI's form."""
_RESPONSES_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of a chat's parameters in a request for a response, which is translated into a chat."""
_MESSAGES_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "reasoning": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Names of a chat's parameters in a request for a message, which is translated into a chat."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's types of errors; others are ``invalid_request_error`` or ``api_error``."""


@dataclass(frozen=True, slots=True)
class ErrorStyle:
    """How one API writes errors.

    Attributes:
        body: The body of an error, for an answer and for an event of a stream.
        statuses: Statuses that differ from TGI's.
        names: Names of a chat's parameters in this API, where they differ.
        plain: Errors may be plain text.
        overloaded: Status of an overloaded server. Default: as TGI's.
    """

    body: Callable[[ApiError], bytes]
    statuses: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    plain: bool = False
    overloaded: int | None = None

    def status(self, error: ApiError) -> int:
        """The HTTP status of an error."""
        if self.overloaded is not None and error.error_type == "overloaded":
            return self.overloaded
        return self.statuses.get(error.status, error.status)

    def possible(self, statuses: set[int]) -> set[int]:
        """The statuses of answers that have ``statuses`` on TGI's routes."""
        found = {self.statuses.get(status, status) for status in statuses}
        return found | {self.overloaded} if self.overloaded and 429 in found else found

    def renamed(self, error: ApiError) -> ApiError:
        """The error with this API's names of parameters."""
        if not self.names or error.keep_names:
            return error
        message = error.openai_message
        for name, own in self.names.items():
            message = message.replace(f"`{name}`", f"`{own}`")
        param = self.names.get(error.param or "", error.param)
        return replace(error, openai_message=message, param=param)


def tgi_body(error: ApiError) -> bytes:
    """The JSON object of TGI's routes and their streams."""
    return msgspec.json.encode({"error": error.message, "error_type": error.error_type})


def openai_body(error: ApiError) -> bytes:
    """The JSON object of OpenAI's routes and their streams."""
    kind = "server_error" if error.is_servers else "invalid_request_error"
    details = {
        "message": error.openai_message,
        # For a limit that was reached, the type names it.
        "type": "requests" if error.status == 429 else kind,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": details, "error_type": error.error_type})


def anthropic_body(error: ApiError) -> bytes:
    """The JSON object of Anthropic's routes and their streams.

    The words about a prompt that is too long are those that agents recognise.
    """
    message = error.openai_message
    if error.overflow is not None:
        tokens, most = error.overflow
        message = f"prompt is too long: {tokens} tokens > {most} maximum"
    other = "api_error" if error.is_servers else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(ANTHROPIC.status(error), other)
    record = access_log.record()
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {"type": kind, "message": message},
            "request_id": None if record is None else record.request_id,
        }
    )


_TRANSLATED = {422: 400, 424: 500}

TGI = ErrorStyle(tgi_body, plain=True)
OPENAI = ErrorStyle(openai_body, _TRANSLATED)
RESPONSES = replace(OPENAI, names=_RESPONSES_NAMES)
ANTHROPIC = ErrorStyle(anthropic_body, _TRANSLATED, _MESSAGES_NAMES, overloaded=529)

_STYLES = (
    (ANTHROPIC, ("/v1/messages", "/messages")),
    (RESPONSES, ("/v1/responses", "/responses")),
    (
        OPENAI,
        ("/v1", "/chat/completions", "/completions", "/models", "/embeddings", "/detokenize",
         "/infill", "/version"),
    ),
)  # fmt: skip
"""Styles by path, which includes the paths below it; TGI's for all others."""
_SHARED = ("/v1/models", "/models")
"""Paths below ``/v1`` that both vendors' clients request."""


def style_of(path: str, route: str = "") -> ErrorStyle:
    """The style of errors of a path, or of the route with this name."""
    if route not in _VERTEX_ROUTES:
        for style, paths in _STYLES:
            if any(path == each or path.startswith(f"{each}/") for each in paths):
                return style
    return TGI


def style_for(scope: Scope) -> ErrorStyle:
    """The style of errors of a request."""
    path = scope["path"]
    style = style_of(path, getattr(scope.get("route"), "name", ""))
    if style is OPENAI and any(path == each or path.startswith(f"{each}/") for each in _SHARED):
        for name, _ in scope["headers"]:
            if name == b"anthropic-version":
                return ANTHROPIC
    return style


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error in the form of the API that the request belongs to."""
    style = style_for(scope)
    status, media_type = style.status(error), "application/json"
    if style.plain and error.plain:
        body, media_type = error.message.encode(), "text/plain"
    else:
        body = style.body(style.renamed(error))
    return Response(body, status, headers=error.headers, media_type=media_type)
